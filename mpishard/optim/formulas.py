# mypy: allow-untyped-defs
"""The formulas of the update rules, one element at a time (see `mpishard.backend.array.elementwise`).

``p`` is a parameter and ``g`` its gradient.  The division of ``g`` by `divisor` comes first and is a true division, so
that sums of integers stay exact.  The other arrays are the rule's slots.  ``rest1`` is one minus ``beta1``, rounded
after the subtraction, and ``rest2`` and ``rest`` likewise: ``1 - 0.999`` in float32 is wrong by 5e-5.
"""

from math import sqrt

from mpishard.backend.array import elementwise


@elementwise
def sgd(p, g, /, divisor, clip, lr, weight_decay):
    g = g / divisor * clip + weight_decay * p
    p = p - lr * g
    return p


@elementwise
def sgd_momentum(p, g, b, /, divisor, clip, lr, weight_decay, momentum, gain):
    g = g / divisor * clip + weight_decay * p
    b = momentum * b + gain * g
    p = p - lr * b
    return p, b


@elementwise
def sgd_nesterov(p, g, b, /, divisor, clip, lr, weight_decay, momentum, gain):
    g = g / divisor * clip + weight_decay * p
    b = momentum * b + gain * g
    p = p - lr * (g + momentum * b)
    return p, b


# One formula serves Adam, which adds the decay to the gradient, and AdamW, which subtracts it from the parameter.  Each
# decay is a scalar; the unused one is neutral (0 or 1) and changes no bit.


@elementwise
def adam(p, g, m, v, /, divisor, clip, weight_decay, keep, beta1, rest1, beta2, rest2, step_size, correction, eps):
    g = g / divisor * clip + weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    p = keep * p - step_size * (m / (sqrt(v) / correction + eps))
    return p, m, v


@elementwise
def amsgrad(
    p, g, m, v, top, /, divisor, clip, weight_decay, keep, beta1, rest1, beta2, rest2, step_size, correction, eps
):
    g = g / divisor * clip + weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    top = max(top, v)
    p = keep * p - step_size * (m / (sqrt(top) / correction + eps))
    return p, m, v, top


@elementwise
def rmsprop(p, g, v, /, divisor, clip, lr, weight_decay, alpha, rest, eps):
    g = g / divisor * clip + weight_decay * p
    v = alpha * v + rest * (g * g)
    p = p - lr * (g / (sqrt(v) + eps))
    return p, v


@elementwise
def rmsprop_momentum(p, g, v, b, /, divisor, clip, lr, weight_decay, alpha, rest, eps, momentum):
    g = g / divisor * clip + weight_decay * p
    v = alpha * v + rest * (g * g)
    b = momentum * b + g / (sqrt(v) + eps)
    p = p - lr * b
    return p, v, b


# Rounding can make the centered second moment negative where gradients hardly change.


@elementwise
def rmsprop_centered(p, g, v, a, /, divisor, clip, lr, weight_decay, alpha, rest, eps):
    g = g / divisor * clip + weight_decay * p
    v = alpha * v + rest * (g * g)
    a = alpha * a + rest * g
    p = p - lr * (g / (sqrt(max(v - a * a, 0)) + eps))
    return p, v, a


@elementwise
def rmsprop_centered_momentum(p, g, v, a, b, /, divisor, clip, lr, weight_decay, alpha, rest, eps, momentum):
    g = g / divisor * clip + weight_decay * p
    v = alpha * v + rest * (g * g)
    a = alpha * a + rest * g
    b = momentum * b + g / (sqrt(max(v - a * a, 0)) + eps)
    p = p - lr * b
    return p, v, a, b


@elementwise
def adagrad(p, g, total, /, divisor, clip, lr, weight_decay, eps):
    g = g / divisor * clip + weight_decay * p
    total = total + g * g
    p = p - lr * (g / (sqrt(total) + eps))
    return p, total


@elementwise
def lion(p, g, m, /, divisor, clip, lr, keep, beta1, rest1, beta2, rest2):
    g = g / divisor * clip
    c = beta1 * m + rest1 * g
    p = keep * p - lr * (1 if c > 0 else (-1 if c < 0 else c))
    m = beta2 * m + rest2 * g
    return p, m


@elementwise
def lamb_direction(
    p, g, m, v, u, /, divisor, clip, weight_decay, beta1, rest1, beta2, rest2, correction1, correction2, eps
):
    g = g / divisor * clip
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    u = (m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * p
    return m, v, u


@elementwise
def lamb_apply(p, u, /, step_size):
    p = p - step_size * u
    return p


@elementwise
def muon_direction(g, b, u, /, divisor, clip, rest, look):
    g = g / divisor * clip
    b = b + rest * (g - b)
    u = look * b + (1.0 - look) * g
    return b, u


@elementwise
def muon_apply(p, u, /, keep, step_size):
    p = keep * p - step_size * u
    return p


# Before a rule, with a divisor of 1 then: as torch.nn.utils.clip_grad_value_ of the averaged gradient.


@elementwise
def clip_by_value(g, /, divisor, most):
    g = min(max(g / divisor, -most), most)
    return g


# After a rule: the exponential moving average `a` of the parameters.


@elementwise
def moving_average(a, p, /, keep, rest):
    a = keep * a + rest * p
    return a


# Sums that become means, and workers of Local SGD, which take separate steps.


@elementwise
def divide(total, /, divisor):
    total = total / divisor
    return total


@elementwise
def lag(out, anchor, own, /, workers):
    """This worker's term of the mean; the number of workers is that of the start."""
    out = (anchor - own) / workers
    return out


@elementwise
def follow(own, anchor, then, /):
    own = own + (anchor - then)
    return own
