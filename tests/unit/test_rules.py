"""Update rules against ``torch.optim`` and the papers, and flat parameters made of the tensors of others."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standin
from devices import Device

import mpishard
from mpishard import ParameterSpec
from mpishard.backend import array as arrays
from mpishard.backend.array import aligned_copy, joined
from mpishard.backend.exact_norms import norm_of
from mpishard.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Muon, ParameterGroup, RMSprop, Rule
from mpishard.optim.lr_schedules import cosine
from mpishard.parameters.flat import FlatParameters

# Update rules against ``torch.optim``, and against plain transcriptions of the papers where torch has no such rule.

SIZE, STEPS = 1003, 200
LIMITS = {np.float64: 1e-12, np.float32: 1e-5}
KINDS = [SGD, Adam, AdamW, RMSprop, Adagrad, Lion, LAMB]

# Every kernel, and every option of every rule at least once, alone and together.
RULES: dict[str, Rule] = {
    "SGD": SGD(lr=0.1),
    "SGD-decay": SGD(lr=0.1, weight_decay=0.05),
    "SGD-momentum": SGD(lr=0.1, momentum=0.9),
    "SGD-dampening": SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "SGD-nesterov": SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    "Adam": Adam(),
    "Adam-decay": Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05),
    "Adam-amsgrad": Adam(lr=0.01, betas=(0.8, 0.9), weight_decay=0.05, amsgrad=True),
    "AdamW": AdamW(lr=0.01),
    "AdamW-betas": AdamW(lr=0.01, betas=(0.0, 0.5), eps=1e-3, weight_decay=0.3),
    "AdamW-amsgrad": AdamW(lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "RMSprop": RMSprop(),
    "RMSprop-decay": RMSprop(alpha=0.9, eps=1e-6, weight_decay=0.05),
    "RMSprop-momentum": RMSprop(lr=0.001, momentum=0.9),
    "RMSprop-centered": RMSprop(lr=0.001, centered=True),
    "RMSprop-all": RMSprop(lr=0.001, momentum=0.5, centered=True, weight_decay=0.05),
    "Adagrad": Adagrad(),
    "Adagrad-all": Adagrad(lr=0.1, lr_decay=0.01, weight_decay=0.05, initial_accumulator_value=0.1, eps=1e-6),
    "Lion": Lion(lr=0.001),
    "Lion-decay": Lion(lr=0.001, betas=(0.95, 0.98), weight_decay=0.3),
    "LAMB": LAMB(lr=0.01),
    "LAMB-plain": LAMB(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0),
}
OF_PAPERS = [name for name in RULES if name.startswith(("Lion", "LAMB"))]
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def start(dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SIZE).astype(dtype)


def gradients(dtype: Any, steps: int = STEPS) -> Iterator[np.ndarray]:
    """A gradient for every step: noise of many sizes around a mean that drifts from element to element."""
    rng = np.random.default_rng(1)
    mean, width = rng.standard_normal(SIZE), np.exp(rng.uniform(-5, 3, SIZE))
    for step in range(steps):
        yield (width * (np.sin(0.05 * step + mean) + 0.5 * rng.standard_normal(SIZE))).astype(dtype)


def state(rule: Rule, size: int, dtype: Any) -> list[np.ndarray]:
    return [np.full(size, rule.initial(slot), dtype) for slot in rule.slots]


def run(rule: Rule, dtype: Any) -> np.ndarray:
    """Parameters after every step, (STEPS, SIZE); gradients are only read."""
    parameters, slots = start(dtype), state(rule, SIZE, dtype)
    path = np.empty((STEPS, SIZE), dtype)
    for step, gradient in enumerate(gradients(dtype), start=1):
        gradient.flags.writeable = False
        rule.update(parameters, gradient, slots, step)
        path[step - 1] = parameters
    return path


def assert_close(path: np.ndarray, reference: np.ndarray, limit: float) -> None:
    """At every step: the difference is below `limit` of the parameters in norm, and of each element.

    A single element may pass through zero, so it is measured against the larger of itself and a typical element.
    """
    path, reference = path.astype(np.float64), reference.astype(np.float64)
    norms = np.linalg.norm(reference, axis=1)
    assert np.max(np.linalg.norm(path - reference, axis=1) / norms) < limit
    typical = norms[:, None] / math.sqrt(SIZE)
    assert np.max(np.abs(path - reference) / np.maximum(np.abs(reference), typical)) < limit
    moved = np.linalg.norm(reference[-1] - reference[0]) / norms[0]
    assert moved > 1e-3, "the reference hardly moved, so this compares nothing"


# Against PyTorch.


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch, the reference, is not installed (extra: peers)")


def numbers(rule: Rule) -> dict[str, Any]:
    """What PyTorch's rule of the same name takes."""
    return {name: value for name, value in vars(rule).items() if name not in ("groups", "ema_decay")}


@each_dtype
@pytest.mark.parametrize("name", [name for name in RULES if name not in OF_PAPERS])
def test_rule_follows_torch(torch: Any, name: str, dtype: Any) -> None:
    rule = RULES[name]
    parameter = torch.nn.Parameter(torch.from_numpy(start(dtype)))
    optimizer = getattr(torch.optim, type(rule).__name__)([parameter], **numbers(rule))
    reference = np.empty((STEPS, SIZE), dtype)
    for step, gradient in enumerate(gradients(dtype)):
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        reference[step] = parameter.detach().numpy()
    assert_close(run(rule, dtype), reference, LIMITS[dtype])


@pytest.mark.parametrize("kind", KINDS[:5])
def test_defaults_are_those_of_torch(torch: Any, kind: type[Rule]) -> None:
    defaults = getattr(torch.optim, kind.__name__)([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert {name: defaults[name] for name in numbers(kind())} == numbers(kind())


MUONS = {
    "default": Muon(lr=0.05, matrices="w"),
    "rms": Muon(lr=0.05, matrices="w", nesterov=False, momentum=0.8, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    "own": Muon(lr=0.05, matrices="w", ns_steps=3, ns_coefficients=(2.0, -1.5, 0.5), eps=1e-3, adjust_lr_fn="original"),
}


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 5), (5, 1)])
@pytest.mark.parametrize("rule", MUONS.values(), ids=MUONS)
def test_muon_follows_torch(torch: Any, monkeypatch: pytest.MonkeyPatch, rule: Muon, shape: tuple[int, int]) -> None:
    """To rounding, where its products are in float64 too; and as it is, to the rounding of bfloat16."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    own = {name: value for name, value in numbers(rule).items() if name not in ("matrices", "rest")}
    random = np.random.default_rng(3)
    begin, slopes = random.standard_normal(shape), random.standard_normal((20, *shape))
    slopes[10] = 0
    for exact, limit in ((True, 1e-12), (False, 0.1)):
        if exact:
            monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        parameter = torch.nn.Parameter(torch.from_numpy(begin.copy()))
        optimizer = torch.optim.Muon([parameter], **own)
        values, slots = begin.copy(), state(rule, begin.size, np.float64)
        for step, slope in enumerate(slopes, 1):
            parameter.grad = torch.from_numpy(slope)
            optimizer.step()
            rule.update(values, slope, slots, step)
            moved = np.linalg.norm(values - begin)
            assert np.linalg.norm(values - parameter.detach().numpy()) <= limit * moved
        monkeypatch.undo()
    defaults = torch.optim.Muon([parameter]).defaults
    assert numbers(Muon(matrices="w")) == {**defaults, "matrices": ("w",), "rest": AdamW()}


def test_muon_has_the_matrices_and_another_rule_the_rest() -> None:
    shapes = {"embed": (7, 3), "a.weight": (3, 3), "a.bias": (3,), "a.kernel": (2, 3, 3), "head.weight": (7, 3)}
    rest = AdamW(groups=[ParameterGroup("*.bias", weight_decay=0)])
    groups = [ParameterGroup("a.weight", lr_factor=0.5)]
    rule = Muon(lr=0.5, matrices=["a.*", "head.*"], rest=rest, groups=groups)
    embed, first, bias, kernel, head = rule.by_shape(shapes)
    assert embed is kernel is rest and isinstance(first, Muon) and head is rule
    assert (first.lr, head.lr) == (0.25, 0.5) and bias == AdamW(weight_decay=0, groups=rest.groups)
    assert rule.slots == ("exp_avg", "exp_avg_sq")
    plain = rule.configuration()
    assert plain["matrices"] == "a.*; head.*" and plain["rest_rule"] == "AdamW"
    assert all(isinstance(value, int | float | str) for value in plain.values())
    assert not Muon(matrices="w", eps=0.0).orthogonalized(np.zeros((2, 3))).any()
    with pytest.raises(ValueError, match="1 tensors that matrices=.*two dimensions"):
        Muon(matrices="a.bias").by_shape(shapes)
    with pytest.raises(ValueError, match="'b.*' .*embed, "):
        Muon(matrices="b.*").by_shape(shapes)
    with pytest.raises(ValueError, match="whole matrix, got"):
        rule.update(np.zeros(4), np.zeros(4), [np.zeros(4)] * 2, 1)


def test_groups_are_those_of_torch(torch: Any) -> None:
    own = [ParameterGroup("*.bias", weight_decay=0), ParameterGroup("head.*", lr_factor=0.1)]
    rules = AdamW(lr=0.01, weight_decay=0.1, groups=own).by_tensor(
        ["body.weight", "body.bias", "head.weight", "head.bias"]
    )
    of_torch: list[dict[str, float]] = [{}, {"weight_decay": 0.0}, {"lr": 0.001}, {"lr": 0.001, "weight_decay": 0.0}]
    parameters = [torch.nn.Parameter(torch.from_numpy(start(np.float64))) for _ in of_torch]
    groups = [{"params": [own], **values} for own, values in zip(parameters, of_torch, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    ours = [run(each, np.float64) for each in rules]
    for step, gradient in enumerate(gradients(np.float64)):
        for each in parameters:
            each.grad = torch.from_numpy(gradient)
        optimizer.step()
        if step in (0, 7, STEPS - 1):
            for each, found in zip(parameters, ours, strict=True):
                np.testing.assert_allclose(found[step], each.detach().numpy(), rtol=0, atol=1e-12)


# Against transcriptions of the papers, line by line, in float64.


def lion(rule: Any) -> Iterator[np.ndarray]:
    """Chen et al. 2023, algorithm 2."""
    beta1, beta2 = rule.betas
    theta, m = start(np.float64), np.zeros(SIZE)
    for g in gradients(np.float64):
        c = beta1 * m + (1 - beta1) * g
        theta = theta - rule.lr * (np.sign(c) + rule.weight_decay * theta)
        m = beta2 * m + (1 - beta2) * g
        yield theta


def lamb(rule: Any) -> Iterator[np.ndarray]:
    """You et al. 2020, algorithm 2, for one layer and phi(z) = z."""
    beta1, beta2 = rule.betas
    x, m, v = start(np.float64), np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(gradients(np.float64), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        r = m_hat / (np.sqrt(v_hat) + rule.eps)
        u = r + rule.weight_decay * x
        x = x - rule.lr * np.linalg.norm(x) / np.linalg.norm(u) * u
        yield x


@each_dtype
@pytest.mark.parametrize("name", OF_PAPERS)
def test_rule_follows_its_paper(name: str, dtype: Any) -> None:
    rule = RULES[name]
    assert_close(run(rule, dtype), np.array(list((lion if isinstance(rule, Lion) else lamb)(rule))), LIMITS[dtype])


def test_lion_without_a_gradient_stands_still() -> None:
    parameters, slots = np.array([1.0, -2.0]), [np.zeros(2)]
    Lion(lr=0.1).update(parameters, np.zeros(2), slots, 1)
    assert np.array_equal(parameters, [1, -2])


def test_lamb_by_halves_is_lamb() -> None:
    """Three tensors in two shards that cut one of them: norms of whole tensors, direction and apply by slices."""
    rule = LAMB(lr=0.01)
    tensors, shards = list(pairwise([0, 100, 700, SIZE])), list(pairwise([0, 400, SIZE]))
    expected, slots = start(np.float64), state(rule, SIZE, np.float64)
    parameters, own, direction = start(np.float64), state(rule, SIZE, np.float64), np.empty(SIZE)
    for step, gradient in enumerate(gradients(np.float64, 19), 1):
        for a, b in tensors:
            rule.update(expected[a:b], gradient[a:b], [slot[a:b] for slot in slots], step, divisor=3, clip=0.5)
        for a, b in shards:
            part = [slot[a:b] for slot in own]
            rule.direction(parameters[a:b], gradient[a:b], part, step, divisor=3, clip=0.5, out=direction[a:b])
        for a, b in tensors:
            norms = norm_of(parameters[a:b]), norm_of(direction[a:b])
            rule.apply(parameters[a:b], direction[a:b], step, rule.trust_ratio(*norms))
    assert np.array_equal([parameters, *own], [expected, *slots])
    assert LAMB.trust_ratio(0.0, 4.0) == LAMB.trust_ratio(4.0, 0.0) == 1.0 and LAMB.trust_ratio(4.0, 2.0) == 2.0


# What sharding rests on.


@each_dtype
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if not rule.norm_based], ids=repr)
def test_slices_get_the_bits_of_the_whole(rule: Rule, dtype: Any) -> None:
    """Vectorised loop bodies, their remainders and all alignments must round alike (LAMB: by halves, above)."""
    size = 403
    whole, slots = start(dtype)[:size], state(rule, size, dtype)
    cuts = (range(size), [0, 1, 8, 15, 16, 33, 64, 127, 333, size - 1], [0, 0, 500, 500])
    sliced = [(cut, whole.copy(), [slot.copy() for slot in slots]) for cut in cuts]
    for step, gradient in enumerate(gradients(dtype, 3), 1):
        gradient = gradient[:size]
        rule.update(whole, gradient, slots, step, divisor=7, clip=0.9)
        for cut, parameters, own in sliced:
            for a, b in pairwise([*cut, size]):
                rule.update(parameters[a:b], gradient[a:b], [slot[a:b] for slot in own], step, divisor=7, clip=0.9)
            assert np.array_equal([parameters, *own], [whole, *slots])


@each_dtype
@each_rule
def test_device_arrays_get_the_bits_of_the_host(device: Device, rule: Rule, dtype: Any) -> None:
    parameters, slots = start(dtype), state(rule, SIZE, dtype)
    there = [device.put(host) for host in (parameters, np.zeros_like(parameters), *slots)]
    for step, gradient in enumerate(gradients(dtype, 3), 1):
        arrays.copy_to_device(gradient, there[1])
        rule.update(parameters, gradient, slots, step)
        rule.update(there[0], there[1], there[2:], step)
    for host, array in zip([parameters, *slots], [there[0], *there[2:]], strict=True):
        assert np.array_equal(arrays.to_host(array), host)


@pytest.mark.parametrize("divisor", [3, 7, 24, 1000])
def test_sums_of_integers_divide_exactly(divisor: int) -> None:
    """The divisor divides; multiplying by its rounded reciprocal would be wrong in the last place."""
    parameters, sums = np.zeros(1000, np.float32), (np.arange(1000) * divisor).astype(np.float32)
    SGD(lr=1.0).update(parameters, sums, [], 1, divisor=divisor)
    assert np.array_equal(parameters, -np.arange(1000, dtype=np.float32))


@each_rule
def test_divisor_comes_before_clip(rule: Rule) -> None:
    results, gradient = [], next(gradients(np.float64))
    for given, options in ((gradient, {"divisor": 7.0, "clip": 0.3}), (gradient / 7.0 * 0.3, {})):
        results.append(start(np.float64))
        rule.update(results[-1], given, state(rule, SIZE, np.float64), 1, **options)
    assert np.array_equal(*results)


# Slots, learning rates, hyper-parameters.


@pytest.mark.parametrize(
    ("rule", "slots"),
    [
        (SGD(), ()),
        (SGD(momentum=0.9), ("momentum_buffer",)),
        (Adam(), ("exp_avg", "exp_avg_sq")),
        (AdamW(amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (RMSprop(), ("square_avg",)),
        (RMSprop(momentum=0.9, centered=True), ("square_avg", "grad_avg", "momentum_buffer")),
        (Adagrad(), ("sum",)),
        (Lion(), ("exp_avg",)),
        (LAMB(), ("exp_avg", "exp_avg_sq")),
    ],
    ids=repr,
)
def test_slots(rule: Rule, slots: tuple[str, ...]) -> None:
    assert rule.slots == slots
    assert len(rule.kernel.arrays) == 2 + len(slots) + rule.norm_based
    assert len(rule.kernel.scalars) == 2 + len(rule.scalars(1))
    assert AdamW().initial("exp_avg") == 0.0 and Adagrad(initial_accumulator_value=0.5).initial("sum") == 0.5


@each_rule
def test_arguments_that_do_not_fit_change_nothing(rule: Rule) -> None:
    parameters, slots, ones = start(np.float64), state(rule, SIZE, np.float64), np.ones(SIZE)
    with pytest.raises(ValueError, match=f"got {len(rule.slots) + 1} arrays"):
        rule.update(parameters, ones, [*slots, ones], 1)
    with pytest.raises(ValueError, match="of one size"):
        rule.update(parameters, ones[1:], slots, 1)
    with pytest.raises(TypeError, match="p is float64 and g is float32"):
        rule.update(parameters, ones.astype(np.float32), slots, 1)
    with pytest.raises(ValueError, match="steps .*got step 0"):
        rule.update(parameters, ones, slots, 0)
    assert np.array_equal([parameters, *slots], [start(np.float64), *state(rule, SIZE, np.float64)])


@each_kind
def test_schedules_set_the_rate_of_every_step(kind: Callable[..., Rule]) -> None:
    schedule = cosine(0.01, 10, warmup=3, floor=0.001)
    parameters, slots = start(np.float64), state(kind(), SIZE, np.float64)
    expected, others = parameters.copy(), [slot.copy() for slot in slots]
    for step, gradient in enumerate(gradients(np.float64, 12), 1):
        kind(lr=schedule).update(parameters, gradient, slots, step)
        kind(lr=schedule(step)).update(expected, gradient, others, step)
    assert np.array_equal(parameters, expected)


def test_schedules_may_not_return_nonsense() -> None:
    for bad in (-1.0, math.nan, math.inf, None, "0.1", True):
        with pytest.raises(ValueError, match=rf"SGD: lr\(3\) .*got {bad!r}"):
            SGD(lr=lambda step, bad=bad: bad).scalars(3)


@each_kind
def test_rules_are_values(kind: type[Rule]) -> None:
    assert kind() == kind() and hash(kind()) == hash(kind()) and kind(lr=0.5) != kind()
    assert isinstance(kind(), Rule) and eval(repr(kind())) == kind()
    assert kind(lr=0.5) == kind(0.5)
    with pytest.raises(FrozenInstanceError):
        kind().lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="abstract"):
        Rule(lr=0.1)  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SGD(lr=-0.1), ValueError, "SGD: lr=-0.1"),
        (lambda: AdamW(lr=math.nan), ValueError, "AdamW: lr=nan"),
        (lambda: AdamW(lr=math.inf), ValueError, "AdamW: lr=inf"),
        (lambda: SGD(lr="0.1"), TypeError, "SGD: lr='0.1'"),
        (lambda: SGD(lr=True), TypeError, "SGD: lr=True"),
        (lambda: SGD(momentum=-1), ValueError, "SGD: momentum=-1"),
        (lambda: SGD(momentum=0.9, weight_decay=-1), ValueError, "weight_decay=-1"),
        (lambda: SGD(nesterov=True), ValueError, "nesterov .*momentum"),
        (lambda: SGD(momentum=0.9, dampening=0.1, nesterov=True), ValueError, "dampening of 0"),
        (lambda: SGD(momentum=0.9, nesterov="no"), TypeError, "SGD: nesterov='no'"),
        (lambda: Adam(betas=(1.0, 0.9)), ValueError, r"Adam: betas\[0\]=1.0"),
        (lambda: Adam(betas=(0.9, -0.1)), ValueError, r"Adam: betas\[1\]=-0.1"),
        (lambda: Adam(betas=(False, 0.9)), TypeError, r"Adam: betas\[0\]=False"),
        (lambda: AdamW(betas=0.9), TypeError, "AdamW: betas=0.9"),
        (lambda: AdamW(betas=(0.9,)), TypeError, r"AdamW: betas=\(0.9,\)"),
        (lambda: Adam(amsgrad=1), TypeError, "Adam: amsgrad=1"),
        (lambda: LAMB(eps=None), TypeError, "LAMB: eps=None"),
        (lambda: RMSprop(alpha=1.0), ValueError, "RMSprop: alpha=1.0"),
        (lambda: Adagrad(lr_decay=-1), ValueError, "Adagrad: lr_decay=-1"),
        (lambda: Adagrad(initial_accumulator_value=-1), ValueError, "initial_accumulator_value=-1"),
        (lambda: Muon(matrices="w", momentum=1.0), ValueError, "momentum=1.0"),
        (lambda: Muon(matrices="w", ns_steps=0), ValueError, "ns_steps=0"),
        (lambda: Muon(matrices="w", ns_steps=100), ValueError, "ns_steps=100"),
        (lambda: Muon(matrices="w", ns_coefficients=(1.0, 2.0)), TypeError, "must be three numbers"),
        (lambda: Muon(matrices="w", adjust_lr_fn="other"), ValueError, 'adjust_lr_fn=.*"original"'),
        (lambda: Muon(matrices="w", rest="AdamW"), TypeError, "rest=.*rule"),
        (lambda: Muon(matrices="w", rest=LAMB()), ValueError, "element-wise rule"),
        (lambda: Muon(matrices="w", rest=SGD()), ValueError, "element-wise rule"),
        (lambda: Muon(matrices="w", rest=AdamW(ema_decay=0.5)), ValueError, "give ema_decay to Muon"),
        (lambda: Muon(matrices=()), ValueError, "name no tensor"),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], Rule], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_fields_of_a_rule_of_ones_own_are_checked_by_their_type() -> None:
    @dataclass(frozen=True)
    class Own(SGD):
        pull: float = -0.5
        warm: bool = False
        note: str = ""
        rounds: int = 2

    assert (Own(pull=3).pull, Own().pull) == (3.0, -0.5)
    assert type(Own(rounds=np.int64(3)).rounds) is int  # one of NumPy cannot be saved
    wrong: list[dict[str, Any]] = [{"pull": "1"}, {"warm": 1}, {"rounds": 2.5}]
    for values, error in (({"pull": math.nan}, ValueError), *((each, TypeError) for each in wrong)):
        with pytest.raises(error, match=f"Own: {next(iter(values))}="):
            Own(**values)  # type: ignore[arg-type]


def test_configuration_is_plain() -> None:
    plain = {
        "rule": "AdamW",
        "lr": 1.0,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
    }
    assert AdamW(lr=1, betas=[0.8, 0.9]).configuration() == plain  # type: ignore[arg-type]
    assert SGD(lr=cosine(0.1, 10)).configuration()["lr"] == "cosine(peak=0.1, steps=10)"
    for rule in RULES.values():
        assert all(type(value) in (float, str, bool) for value in rule.configuration().values())


# Flat parameters made of the tensors of others.


def test_named_tensors_become_views_of_one_array():
    tensors = {"weight": np.arange(6.0).reshape(2, 3).T, "scale": np.array(7.0), "bias": np.zeros(0)}
    parameters = FlatParameters.of(tensors)
    assert [(spec.name, spec.shape) for spec in parameters.specs] == [("weight", (3, 2)), ("scale", ()), ("bias", (0,))]
    assert np.array_equal(parameters.flat, [0, 3, 1, 4, 2, 5, 7])
    parameters.flat[...] += 1
    for name, tensor in tensors.items():
        assert np.array_equal(parameters[name], tensor + 1)


def test_a_module_of_pytorch_goes_on_with_the_views(torch):
    module = torch.nn.Linear(3, 2)
    parameters = FlatParameters.of({name: p.detach() for name, p in module.named_parameters()})
    assert parameters.dtype == np.float32 and list(parameters) == ["weight", "bias"]
    for name, p in module.named_parameters():
        assert np.array_equal(parameters[name], p.detach())
        p.data = torch.from_numpy(parameters[name])
    parameters.flat[...] = 1
    assert module(torch.ones(3)).tolist() == [4, 4]


def test_a_dictionary_of_jax_is_taken():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    parameters = FlatParameters.of({"weight": jnp.ones((2, 2)), "bias": jnp.zeros(2)})
    assert parameters.dtype == np.float32 and parameters.flat.tolist() == [1, 1, 1, 1, 0, 0]
    shared = jnp.from_dlpack(parameters.flat)
    assert shared.unsafe_buffer_pointer() == parameters.flat.ctypes.data


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float16",), ("int64",)])
def test_other_dtypes_are_refused(dtypes):
    with pytest.raises(TypeError, match=f"got {' and '.join(dtypes)}"):
        FlatParameters.of({dtype: np.zeros(2, dtype) for dtype in dtypes})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_copies_begin_at_64_bytes(size, dtype):
    array = np.arange(2 * size, dtype=dtype)[::2]
    copy = aligned_copy(array)
    assert (copy.ctypes.data % 64 == 0 or not size) and copy.flags.c_contiguous and copy.flags.writeable
    assert copy.dtype == dtype and np.array_equal(copy, array) and not np.shares_memory(copy, array)


def test_tensors_are_copied_once():
    """The memory that it takes is that of the flat array, which JAX can share."""
    tensors = {"a": np.arange(2.0e5).reshape(2, -1), "b": np.array(3.0), "c": np.zeros((0, 2))}
    tracemalloc.start()
    try:
        flat = FlatParameters.of(tensors).flat
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(flat, [*tensors["a"].reshape(-1), 3.0]) and flat.ctypes.data % 64 == 0
    assert peak < 1.5 * flat.nbytes


def made_with(module: Any) -> Iterator[Callable[[], object]]:
    yield lambda: FlatParameters([ParameterSpec("a", (3,))], module=module)
    for half in (None, np.float16):
        yield lambda half=half: mpishard.nn.GPT(
            vocabulary_size=16, context_length=4, width=4, layers=1, heads=2, module=module, compute_dtype=half
        )


@pytest.mark.parametrize("module", ["cupy", None, 3])
def test_what_makes_no_arrays_is_refused(module: Any) -> None:
    for make in made_with(module):
        with pytest.raises(TypeError, match=f"module is {module!r}"):
            make()


@pytest.mark.parametrize("take", [FlatParameters.over, aligned_copy, lambda array: joined([array, array])])
def test_arrays_on_another_gpu_are_refused(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy would compute on the current one."""
    array = standin.zeros(3)
    take(array)
    monkeypatch.setattr(standin.StandIn, "device_number", lambda self, array: 1)
    with pytest.raises(ValueError, match="GPU 1, .*GPU 0"):
        take(array)


def test_cupy_without_a_gpu_is_named_with_the_way_out() -> None:
    def get_device() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: too old")

    runtime = SimpleNamespace(getDevice=get_device)
    module = SimpleNamespace(__name__="cupy", zeros=np.zeros, cuda=SimpleNamespace(runtime=runtime))
    match = "cudaErrorInsufficientDriver: too old.*`mpishard info`"
    for make in made_with(module):
        with pytest.raises(RuntimeError, match=match):
            make()
