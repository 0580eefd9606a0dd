"""Every layer's backward pass and kernels against finite differences and plain NumPy."""

from __future__ import annotations

import layer_formulas
import layer_kernels
import ml_dtypes
import numpy as np
import pytest

from mpishard import nn
from mpishard.backend.jit_function import HostFunction
from mpishard.nn import kernels
from mpishard.nn.kernel_groups import exp, wide_vectors
from mpishard.nn.kernels import Array
from mpishard.nn.layers import Draws
from mpishard.parameters.flat import FlatParameters

# Every layer's backward pass against finite differences, and adjoint tests of the linear ones, in float64.

ROWS, WIDTH, LENGTH = 6, 8, 3


class Case:
    """A layer with random tensors, as a function of one vector: its input and its parameters end to end."""

    def __init__(self, layer, shape, **arguments):
        self.layer, self.shape, self.arguments = layer, shape, arguments
        self.parameters = FlatParameters(layer.specs(), np.float64)
        layer.bind(self.parameters)
        self.work = nn.Workspace(np.float64)
        self.work.rows, self.work.draws = len(np.empty(shape)), Draws(0, 5, (4, 1), LENGTH)
        random = np.random.default_rng(3)
        self.parameters.flat[:] = random.standard_normal(self.parameters.size)
        self.x = random.standard_normal(shape)
        self.cotangent = random.standard_normal(self.forward(self.x).shape)

    def forward(self, x):
        return self.layer.forward(x.copy(), self.work, **self.arguments).copy()

    def objective(self, x):
        return float((self.forward(x) * self.cotangent).sum())

    def gradients(self):
        """By the input, and by all parameters."""
        self.parameters.gradients.reset()
        x = self.x.copy()
        self.layer.forward(x, self.work, **self.arguments)
        dx = self.layer.backward(self.cotangent.copy(), self.work, **self.arguments)
        return dx.copy(), self.parameters.gradients.flat.copy()


def numeric(function, vector, step=1e-5):
    """Central differences, changing `vector` in place."""
    gradient = np.empty(vector.size)
    for i in range(vector.size):
        kept = vector.flat[i]
        ends = []
        for sign in (1, -1):
            vector.flat[i] = kept + sign * step
            ends.append(function())
        vector.flat[i] = kept
        gradient[i] = (ends[0] - ends[1]) / (2 * step)
    return gradient.reshape(vector.shape)


CASES = {
    "linear": lambda: Case(nn.Linear("a", WIDTH, 5), (ROWS, WIDTH)),
    "linear without bias": lambda: Case(nn.Linear("a", WIDTH, 5, bias=False), (ROWS, WIDTH)),
    "tied linear": lambda: Case(nn.TiedLinear("a", "table", WIDTH, 5), (ROWS, WIDTH)),
    "layer norm": lambda: Case(nn.LayerNorm("a", WIDTH), (ROWS, WIDTH)),
    "gelu": lambda: Case(nn.GELU("a"), (ROWS, WIDTH)),
    "attention": lambda: Case(nn.CausalSelfAttention("a", WIDTH, 2), (ROWS, WIDTH), length=LENGTH),
    "attention, one token": lambda: Case(nn.CausalSelfAttention("a", WIDTH, 2), (ROWS, WIDTH), length=1),
    "attention, one channel a head": lambda: Case(nn.CausalSelfAttention("a", 3, 3), (ROWS, 3), length=LENGTH),
    "mlp": lambda: Case(nn.MLP("a", WIDTH), (ROWS, WIDTH)),
    "block": lambda: Case(nn.Block("a", WIDTH, 2), (ROWS, WIDTH), length=LENGTH),
    "block with dropout": lambda: Case(nn.Block("a", WIDTH, 2, dropout=0.4), (ROWS, WIDTH), length=LENGTH),
    "rms norm": lambda: Case(nn.RMSNorm("a", WIDTH), (ROWS, WIDTH)),
    "gated mlp": lambda: Case(nn.GatedMLP("a", WIDTH, 5), (ROWS, WIDTH)),
    "grouped queries": lambda: attention(key_value_heads=2, bias=False, output_bias=False),
    "rotary positions": lambda: attention(rotary=nn.Rotary(10.0)),
    "interleaved rotary positions": lambda: attention(key_value_heads=1, rotary=nn.Rotary(10.0, "interleaved")),
    "norms of heads": lambda: attention(key_value_heads=2, head_width=6, rotary=nn.Rotary(10.0), norm_epsilon=1e-3),
    "block of Llama": lambda: Case(block_of_llama(), (ROWS, WIDTH), length=LENGTH),
}


def attention(**options):
    """Attention of four heads of queries."""
    return Case(nn.CausalSelfAttention("a", WIDTH, 4, nn.AttentionOptions(**options)), (ROWS, WIDTH), length=LENGTH)


def block_of_llama():
    options = nn.AttentionOptions(2, bias=False, output_bias=False, rotary=nn.Rotary(10.0), norm_epsilon=1e-3)
    return nn.TransformerBlock(
        "a",
        nn.RMSNorm("a.attention_norm", WIDTH),
        nn.CausalSelfAttention("a.attention", WIDTH, 4, options),
        nn.RMSNorm("a.mlp_norm", WIDTH),
        nn.GatedMLP("a.mlp", WIDTH, 5),
    )


@pytest.mark.pairs(8)
@pytest.mark.parametrize("name", CASES)
def test_backward_against_finite_differences(name):
    case = CASES[name]()
    dx, dparameters = case.gradients()
    np.testing.assert_allclose(dx, numeric(lambda: case.objective(case.x), case.x), rtol=1e-6, atol=1e-6)
    flat = case.parameters.flat
    np.testing.assert_allclose(dparameters, numeric(lambda: case.objective(case.x), flat), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [40, 100, 130, 256])
def test_attention_in_blocks_equals_attention_at_once(length):
    """Sequences that end before, at and after the end of a block of queries."""
    case = Case(nn.CausalSelfAttention("a", WIDTH, 2), (2 * length, WIDTH), length=length)
    tensors = case.parameters
    qkv = (case.x @ tensors["a.qkv.weight"] + tensors["a.qkv.bias"]).reshape(2, length, 2, 3, WIDTH // 2)
    q, k, v = qkv.transpose(3, 0, 2, 1, 4)
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH // 2)
    scores[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(2 * length, WIDTH)
    expected = mixed @ tensors["a.output.weight"] + tensors["a.output.bias"]
    np.testing.assert_allclose(case.forward(case.x), expected, rtol=1e-11, atol=1e-11)
    # Along one direction the derivative needs two evaluations only.
    dx, _ = case.gradients()
    direction = np.random.default_rng(1).standard_normal(case.shape)
    step = 1e-5
    slope = (case.objective(case.x + step * direction) - case.objective(case.x - step * direction)) / (2 * step)
    assert (dx * direction).sum() == pytest.approx(slope, rel=1e-6)


def test_attention_does_not_look_ahead():
    case = CASES["attention"]()
    before = case.forward(case.x)
    case.x[LENGTH - 1 :: LENGTH] += 1
    after = case.forward(case.x)
    last = np.arange(ROWS) % LENGTH == LENGTH - 1
    np.testing.assert_array_equal(after[~last], before[~last])
    assert np.abs(after[last] - before[last]).min() > 0


def test_key_bias_has_no_effect():
    case = CASES["attention"]()
    before = case.forward(case.x)
    bias = case.parameters["a.qkv.bias"].reshape(2, 3, WIDTH // 2)
    bias[:, 1] += 1
    np.testing.assert_allclose(case.forward(case.x), before, rtol=1e-12, atol=1e-12)
    before_bias = case.parameters["a.qkv.weight"].size
    gradient = case.gradients()[1][before_bias : before_bias + bias.size].reshape(bias.shape)
    assert np.abs(gradient[:, 1]).max() < 1e-13 < np.abs(gradient[:, [0, 2]]).min()


def test_adjoint_in_the_input():
    """<A x, y> = <x, A' y>."""
    case = CASES["linear without bias"]()
    dx, _ = case.gradients()
    assert (case.forward(case.x) * case.cotangent).sum() == pytest.approx((case.x * dx).sum(), rel=1e-13)


@pytest.mark.parametrize("name", ["embedding", "positions"])
def test_adjoint_in_the_table(name):
    random = np.random.default_rng(0)
    layer = nn.Embedding("a", 5, WIDTH) if name == "embedding" else nn.PositionEmbedding("a", 5, WIDTH)
    parameters = FlatParameters(layer.specs(), np.float64)
    layer.bind(parameters)
    layer.initialize(0)
    y = random.standard_normal((ROWS, WIDTH))
    work = nn.Workspace(np.float64)
    if name == "embedding":
        image = layer.forward(np.array([0, 4, 4, 1, 0, 4]), work)
        layer.backward(y, work)
    else:
        image = np.zeros((ROWS // LENGTH, LENGTH, WIDTH))
        layer.add_to(image)
        y = y.reshape(image.shape)
        layer.backward_positions(y, work)
    assert (image * y).sum() == pytest.approx((parameters.flat * parameters.gradients.flat).sum(), rel=1e-13)


@pytest.mark.parametrize("name", ["linear", "tied linear", "layer norm", "attention", "mlp", "block", "block of Llama"])
def test_a_second_pass_adds_to_the_first(name):
    case = CASES[name]()
    _, once = case.gradients()
    case.parameters.gradients.reset()
    for _ in range(2):
        case.layer.forward(case.x.copy(), case.work, **case.arguments)
        case.layer.backward(case.cotangent.copy(), case.work, **case.arguments)
    np.testing.assert_allclose(case.parameters.gradients.flat, 2 * once, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["linear", "tied linear", "attention", "mlp", "block", "block of Llama"])
def test_weight_gradients_put_off(name):
    """The gradient by the input comes at once, the others and all announcements later, with the same bits."""
    case = CASES[name]()
    dx, whole = case.gradients()
    case.parameters.gradients.reset()
    announced = []
    case.parameters.gradients.mark_ready = announced.append
    case.work.deferred = []
    x, dy = case.x.copy(), case.cotangent.copy()
    case.layer.forward(x, case.work, **case.arguments)
    np.testing.assert_array_equal(case.layer.backward(dy, case.work, **case.arguments), dx)
    assert not announced
    # What the layers below do next.
    dy.fill(np.nan)
    for memory in case.work.scratch._memory.values():
        memory.fill(np.nan if memory.dtype.kind == "f" else 0)
    for each in case.work.deferred:
        each()
    np.testing.assert_array_equal(case.parameters.gradients.flat, whole)
    assert sorted(announced) == sorted(case.parameters)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_residual(bias):
    case = Case(nn.Linear("a", WIDTH, 5, bias=bias), (ROWS, WIDTH))
    plain, residual = case.forward(case.x), np.ones((ROWS, 5))
    case.arguments = {"residual_no": residual}
    np.testing.assert_allclose(case.forward(case.x), plain + 1, rtol=1e-14)


def test_cross_entropy_gradient():
    random = np.random.default_rng(0)
    logits, targets = random.standard_normal((4, 7)), random.integers(0, 7, 4)
    gradient = logits.copy()
    loss = nn.cross_entropy(gradient, targets)
    exact = np.log(np.exp(logits).sum(axis=1)).sum() - logits[np.arange(4), targets].sum()
    assert loss == pytest.approx(exact, rel=1e-14)
    slopes = numeric(lambda: nn.cross_entropy(logits.copy(), targets), logits)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("pairing", ["half-split", "interleaved"])
def test_rotary_scores_depend_on_the_distance_only(pairing):
    """And the two pairings are one rotation of channels in another order."""
    rotary, random = nn.Rotary(100.0, pairing), np.random.default_rng(0)
    cos, sin = rotary.tables(WIDTH, 9, np.float64)
    q, k = (np.tile(random.standard_normal(WIDTH), (1, 9, 1)) for _ in range(2))
    for x in (q, k):
        layer_formulas.rotate(x, cos, sin, rotary.apart, 0)
    scores = q[0] @ k[0].T
    for offset in range(-8, 9):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)
    back = q.copy()
    layer_formulas.rotate(back, cos, sin, rotary.apart, 1)
    np.testing.assert_allclose(back, np.tile(back[:, :1], (1, 9, 1)), rtol=1e-12)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.Rotary(pairing="halves"), ValueError, "pairing 'halves' .*half-split"),
        (lambda: nn.Rotary(-1.0), ValueError, "theta of rotary positions=-1.0"),
        (lambda: nn.Rotary(scaling=2.0), TypeError, "scaling=2.0"),
        (lambda: nn.RopeScaling("yarn"), ValueError, "rope scaling 'yarn'; .*llama3"),
        (lambda: nn.RopeScaling("llama3", 8.0), ValueError, "llama3 needs original_context"),
        (lambda: nn.RopeScaling("llama3", 8.0, 64, 4.0, 1.0), ValueError, "low_frequency_factor=4"),
        (
            lambda: attention(rotary=nn.Rotary(scaling=nn.RopeScaling("longrope", 2.0, 8, short_factors=(1.0,)))),
            ValueError,
            "1 short_factors and 0 long_factors, .*1 pairs",
        ),
        (lambda: attention(head_width=3, rotary=nn.Rotary()), ValueError, "3 channels; .* make it even"),
        (lambda: attention(key_value_heads=3), ValueError, "4 heads of queries .*3 heads of keys"),
        (lambda: nn.CausalSelfAttention("a", 8, 3), ValueError, "width 8 .*3 heads"),
        (lambda: nn.CausalSelfAttention("a", 8, 0), ValueError, "width 8 .*0 heads"),
    ],
)
def test_attention_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


# The compiled kernels of the layers against their definitions in plain NumPy.

TOLERANCE = {np.float32: 3e-6, np.float64: 1e-14}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def placed(arguments, seed):
    """Copies of the arguments, the arrays in any order in one memory, with gaps of whole elements between them."""
    random, copies = np.random.default_rng(seed), list(arguments)
    places = random.permutation([place for place, a in enumerate(arguments) if isinstance(a, np.ndarray)])
    memory = np.empty(sum(arguments[place].nbytes for place in places) + 200 * len(places) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    for place in places:
        a = arguments[place]
        start += -start % 8 + 8 * int(random.integers(24))
        copies[place] = memory[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        copies[place][...] = a
        start += a.nbytes
    return copies


def compare(name, arguments, scratch=()):
    """Run both forms of a function on copies of the arguments; every array but scratch must come out alike.

    The bits of the compiled one must be the same wherever the arrays lie.
    """

    def called(module, copies):
        result = getattr(module, name)(*copies)
        results = [a for i, a in enumerate(copies) if isinstance(a, np.ndarray) and i not in scratch]
        return results + ([np.asarray(result)] if isinstance(result, float) else [])  # lookup counts on the host alone

    bits = [[a.tobytes() for a in called(kernels, placed(arguments, seed))] for seed in range(20)]
    assert all(each == bits[0] for each in bits), [seed for seed, each in enumerate(bits) if each != bits[0]]
    copies = ([a.copy() if isinstance(a, np.ndarray) else a for a in arguments] for _ in range(2))
    outcomes = [called(module, each) for module, each in zip((layer_formulas, kernels), copies, strict=True)]
    dtype = arguments[0].dtype.type
    for expected, actual in zip(*outcomes, strict=True):
        scale = np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("name, place", layer_kernels.RESULTS.items())
def test_results_may_be_written_as_bits_of_bfloat16(name, place):
    given = layer_kernels.arguments(name, np.float32, n=37, c=130)
    given[0][:2, :3] = [[np.nan, np.inf, -np.inf], [0, -0.0, 1e-42]]
    plain, rounded = ([each.copy() if isinstance(each, np.ndarray) else each for each in given] for _ in range(2))
    getattr(kernels, name)(*plain)
    rounded[place] = np.empty(given[place].shape, np.uint16)
    getattr(kernels, name)(*rounded)
    found, expected = rounded[place].view(ml_dtypes.bfloat16), plain[place].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    for i, (one, other) in enumerate(zip(plain, rounded, strict=True)):
        assert i == place or np.array_equal(one, other, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 3), (5, 4), (3, 8), (37, 64), (64, 130)])
@pytest.mark.parametrize("name", layer_kernels.ROWS)
def test_rows(name, dtype, rows, columns):
    for arguments in layer_kernels.of_rows(name, dtype, rows, columns):
        compare(name, arguments)


@each_dtype
@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 3), (37, 64), (64, 130)])
def test_cross_entropy_in_slices(dtype, rows, columns):
    """All functions of slices together, of which one is empty, against the loss of whole rows."""
    (logits,) = layer_kernels.normal(dtype, (rows, columns))
    targets = np.random.default_rng(1).integers(0, columns, rows)
    whole = logits.copy()
    loss = kernels.cross_entropy(whole, targets)
    slices = [(first, logits[:, first : first + 50].copy()) for first in range(0, columns + 50, 50)]
    tops, sums = np.empty((2, rows), dtype), np.zeros((2, rows), dtype)
    tops[1] = -np.inf
    for _, part in slices:
        compare("row_maximum", [part, tops[0]])
        kernels.row_maximum(part, tops[0])
        np.maximum(tops[0], tops[1], out=tops[1])
    for first, part in slices:
        total, picked = np.empty((2, rows), dtype)
        compare("exponentials", [part, targets, tops[1], total, picked, first, columns])
        kernels.exponentials(part, targets, tops[1], total, picked, first, columns)
        sums += total, picked
    for first, part in slices:
        compare("cross_entropy_of_sums", [part, targets, *sums, first])
        found = kernels.cross_entropy_of_sums(part, targets, *sums, first)
        assert found == pytest.approx(loss, rel=10 * TOLERANCE[dtype], abs=10 * TOLERANCE[dtype])
        np.testing.assert_allclose(part, whole[:, first : first + 50], rtol=0, atol=10 * TOLERANCE[dtype])


# Of the small ones another place gave other bits, as sums were vectorised only far from what was stored.
@each_dtype
@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize(
    "batch, heads, length, width", [(2, 3, 20, 5), (1, 1, 5, 4), (1, 2, 3, 4), (1, 1, 5, 8), (2, 2, 8, 16)]
)
@pytest.mark.parametrize("name", layer_kernels.HEADS)
def test_heads(name, dtype, kinds, batch, heads, length, width):
    compare(name, layer_kernels.of_heads(name, dtype, kinds, batch, heads, length, width))


def test_merging_heads_is_the_adjoint_of_splitting_them_which_is_a_permutation():
    x, bias, heads = layer_kernels.of_heads("split_heads", np.float64, 4, 2, 3, 20, 5)
    kernels.split_heads(x, 0 * bias, heads)
    merged = np.empty_like(x)
    kernels.merge_heads(merged, heads)
    np.testing.assert_array_equal(merged, x)


@each_dtype
@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("backward", [0, 1])
def test_rotate(dtype, apart, backward):
    compare("rotate", [*layer_kernels.normal(dtype, (3, 20, 6), (20, 3), (20, 3)), apart, backward])


@each_dtype
@pytest.mark.parametrize("first, last", layer_kernels.KEYS)
def test_causal_softmax(dtype, first, last):
    compare("causal_softmax", layer_kernels.of_softmax(dtype, 20, first, last), scratch=[2])
    for arguments in layer_kernels.of_softmax_backward(dtype, 20, first, last):
        compare("causal_softmax_backward", arguments)


@pytest.mark.parametrize("x", [-1e4, -88.0, -87.3, -20.0, -1e-3, 0.0, 1e-8, 0.5, 3.0, 88.3])
def test_float32_exponential_is_accurate(x):
    x = np.float32(x)
    logits = np.array([[0.0, x]], np.float32)
    kernels.cross_entropy(logits, np.array([0]))
    exact = np.exp(np.array([0, x], np.float64))
    np.testing.assert_allclose(logits[0] + [1, 0], exact / exact.sum(), rtol=5e-7, atol=1.2e-38)


@each_dtype
def test_gelu_far_from_zero(dtype):
    x = np.array([[-1e4, -30, -12, 12, 30, 1e4]], dtype)
    y = np.empty_like(x)
    kernels.gelu(x, np.zeros(6, dtype), y)
    np.testing.assert_allclose(y, [[0, 0, 0, 12, 30, 1e4]], atol=1e-30)
    np.testing.assert_allclose(x, [[0, 0, 0, 1, 1, 1]], atol=1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_dtype
def test_bad_numbers_are_not_hidden(dtype, bad):
    x = np.zeros((1, 8), dtype)
    x[0, 3] = bad
    assert not np.isfinite(kernels.cross_entropy(x.copy(), np.array([0])))
    y = np.empty_like(x)
    kernels.gelu(x.copy(), np.zeros(8, dtype), y)
    assert not np.isfinite(y[0, 3])
    kernels.layer_norm(x, np.ones(8, dtype), np.zeros(8, dtype), y, np.empty(1, dtype), np.empty(1, dtype), 1e-5)
    assert np.isnan(y).all()


def plain_exponentials(x_n: Array) -> None:
    for i in range(x_n.size):
        x_n[i] = exp(x_n[i])


def wide_exponentials(x_n: Array) -> None:
    wide_vectors()
    for i in range(x_n.size):
        x_n[i] = exp(x_n[i])


def test_wide_vectors_are_those_of_the_kernel_that_asks_and_change_no_bit() -> None:
    import numba

    x = np.linspace(-90, 90, 1003, dtype=np.float32)
    HostFunction(plain_exponentials).dispatcher()  # exponential and width are known to Numba from now on
    found = []
    for function in (plain_exponentials, wide_exponentials):
        compiled = numba.njit(function)
        y = x.copy()
        compiled(y)
        (text,) = compiled.inspect_llvm().values()
        found.append((y, '"prefer-vector-width"="512"' in text))
    (plain, plain_is_wide), (wide, wide_is_wide) = found
    assert (plain_is_wide, wide_is_wide) == (False, True)
    np.testing.assert_array_equal(plain, wide)
