"""Numbers out of range, lengths that do not fit, arrays that are too short: an error, and nothing outside touched."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import standin

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.nn import device_kernels
from mpishard.nn.layers import Draws
from mpishard.nn.units import Batch, queue_cross_entropy
from mpishard.parameters.flat import FlatParameters

COUNT, WIDTH, LENGTH, ROWS = 5, 8, 3, 6
HUGE = 2**40
INDICES = np.arange(ROWS) % COUNT
# Indices that a kernel would follow out of an array of COUNT rows, or read as others, and what the error says.
BAD_INDICES = [
    (np.where(np.arange(ROWS) == 2, bad, INDICES), ValueError, rf"\[2\]={bad} is out of range: valid are 0 to 4")
    for bad in (COUNT, 9, -1, -100, HUGE, -HUGE, 2**63 - 1, -(2**63))
]
BAD_INDICES += [
    (INDICES.astype(dtype), TypeError, f"must be int64, got {np.dtype(dtype)}") for dtype in (float, bool, object, "i4")
]
BAD_INDICES += [
    (INDICES[:-1], ValueError, r"shape \(5,\)"),
    (np.append(INDICES, 0), ValueError, r"shape \(7,\)"),
    (INDICES[:, None], ValueError, r"shape \(6, 1\)"),
    (INDICES.tolist(), TypeError, r"=\[0, 1, 2, 3, 4, 0\] must be an array"),
]
BAD_LENGTHS = [
    (4, ValueError, "6 rows .*length=4"),
    (7, ValueError, "6 rows .*length=7"),
    (0, ValueError, "length=0"),
    (-3, ValueError, "length=-3"),
    (3.0, TypeError, "length=3.0"),
    (True, TypeError, "length=True"),
    (HUGE, ValueError, f"length={HUGE}"),
]


def fenced(array):
    """A copy with guards around it, and a function that asserts that they are as before."""
    memory = np.full(array.size + 128, 77, array.dtype)
    memory[64:-64] = array.reshape(-1)

    def check():
        assert (memory[:64] == 77).all() and (memory[-64:] == 77).all()

    return memory[64:-64].reshape(array.shape), check


def bound(layer, dtype=np.float64):
    """The layer with memory, and a workspace."""
    parameters = FlatParameters(layer.specs(), dtype)
    layer.bind(parameters)
    layer.initialize(0)
    work = nn.Workspace(dtype)
    work.rows = ROWS
    return layer, work


def rows(count=ROWS, width=WIDTH):
    return np.random.default_rng(0).standard_normal((count, width))


@pytest.mark.parametrize("targets, error, message", BAD_INDICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_targets_of_cross_entropy(targets, error, message, dtype):
    logits, check = fenced(rows(width=COUNT).astype(dtype))
    kept = logits.copy()
    with pytest.raises(error, match="targets_n.*" + message):
        nn.cross_entropy(logits, targets)
    check()
    np.testing.assert_array_equal(logits, kept)


def test_labels_to_ignore_are_left_out():
    with pytest.raises(ValueError, match=r"targets_n\[1\]=-100"):
        nn.cross_entropy(rows(2, COUNT), np.array([0, -100]))
    with pytest.raises(ValueError, match="targets range from -100"):
        nn.GPT(vocabulary_size=COUNT, context_length=4, width=WIDTH, layers=1, heads=2).loss([[1, 2]], [[2, -100]])


@pytest.mark.parametrize("dtype", ["f2", int, bool, object, complex])
def test_dtypes_of_logits(dtype):
    with pytest.raises(TypeError, match=f"logits_nv .*got {np.dtype(dtype)}"):
        nn.cross_entropy(np.ones((ROWS, COUNT), dtype), INDICES)


@pytest.mark.parametrize(
    "given, error, message",
    [
        (dict(first=1), ValueError, "first=1 .* 5 columns from first=0"),
        (dict(vocabulary_size=7), ValueError, "vocabulary_size=7: 7 columns"),
        (dict(first=-1), ValueError, "first=-1"),
        (dict(first=0.0), TypeError, "first=0.0"),
        (dict(vocabulary_size="5"), TypeError, "vocabulary_size='5'"),
        (dict(tensor=nn.TensorParallel(shards=2)), ValueError, "give work="),
        (dict(tensor=nn.TensorParallel(shards=2), work=nn.Workspace(float)), ValueError, "need vocabulary_size"),
        (
            dict(tensor=nn.TensorParallel(shards=2), work=nn.Workspace(float), vocabulary_size=6),
            ValueError,
            "logits_nv of 5 columns .*vocabulary_size=6",
        ),
    ],
)
def test_columns_of_cross_entropy(given, error, message):
    with pytest.raises(error, match=message):
        nn.cross_entropy(rows(width=COUNT), INDICES, **given)


@pytest.mark.parametrize("targets, error, message", BAD_INDICES)
def test_targets_of_slices(targets, error, message):
    tensor, work = nn.TensorParallel(shards=2), nn.Workspace(float)
    logits, check = fenced(rows(width=COUNT))
    with pytest.raises(error, match="targets_n.*" + message):
        nn.cross_entropy(logits, targets, tensor, 0, work, COUNT)
    check()


def test_slices_are_views():
    tensor, work = nn.TensorParallel(shards=2), nn.Workspace(float)
    with pytest.raises(ValueError, match="strides .* C-contiguous"):
        nn.cross_entropy(rows(width=2 * COUNT)[:, ::2], INDICES, tensor, 0, work, COUNT)
    logits = rows(width=2 * COUNT)[:, ::2]
    assert nn.cross_entropy(logits.copy(), INDICES) == nn.cross_entropy(logits, np.repeat(INDICES, 2)[::2])


@pytest.mark.parametrize("columns", [COUNT, 20000])
@pytest.mark.parametrize("bad", [COUNT, -1, HUGE, -(2**63)])
@pytest.mark.parametrize("rounded", [False, True])
def test_on_a_device_the_loss_is_nan_and_cross_entropy_says_why(rounded, bad, columns):
    """The host waits for the loss alone, in whose row the gradient is NaN, too."""
    bad += columns - COUNT if bad == COUNT else 0
    host = rows(4, columns).astype(np.float32)
    logits = standin.empty(host.shape, np.float32)
    arrays.copy_to_device(host, logits)
    targets = standin.empty(4, np.int64)
    arrays.copy_to_device(np.array([0, bad, columns - 1, 1]), targets)
    gradient = standin.empty(host.shape, np.float16) if rounded else logits
    if rounded:
        loss = float(device_kernels.cross_entropy_rounded(logits, targets, gradient, columns, 1))
    else:
        loss = float(queue_cross_entropy(logits, targets, nn.TensorParallel(), 0, None, None))
    assert np.isnan(loss)
    assert np.isnan(arrays.to_host(gradient)).all(axis=1).tolist() == [False, True, False, False]
    arrays.copy_to_device(host, logits)
    with pytest.raises(ValueError, match=rf"targets_n\[1\]={bad} .*0 to {columns - 1}"):
        nn.cross_entropy(logits, targets)


@pytest.mark.parametrize("indices, error, message", BAD_INDICES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.PositionEmbedding])
def test_indices_of_tables(kind, indices, error, message):
    layer, work = bound(kind("a", COUNT, WIDTH))
    out, check = fenced(rows())
    with pytest.raises(error, match="indices_n.*" + message):
        layer.forward(indices, work, out)
    check()


def test_rows_of_tables():
    layer, work = bound(nn.Embedding("a", COUNT, WIDTH))
    for shape in ((ROWS + 1, WIDTH), (ROWS, WIDTH + 1), (ROWS * WIDTH,)):
        out, check = fenced(np.zeros(shape))
        with pytest.raises(ValueError, match=rf"y_nc of shape \({shape[0]},"):
            layer.forward(INDICES, work, out)
        check()
    layer.forward(INDICES, work)
    for shape in ((ROWS + 1, WIDTH), (ROWS - 1, WIDTH), (ROWS, WIDTH + 1)):
        with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\)"):
            layer.backward(np.zeros(shape), work)


def test_on_a_device_rows_of_indices_out_of_range_are_nan():
    layer = nn.Embedding("a", COUNT, WIDTH)
    parameters = FlatParameters(layer.specs(), np.float32, module=standin)
    layer.bind(parameters)
    layer.initialize(0)
    indices = standin.empty(ROWS, np.int64)
    arrays.copy_to_device(np.array([0, COUNT, -1, HUGE, COUNT - 1, -(2**63)]), indices)
    found = arrays.to_host(layer.forward(indices, nn.Workspace(np.float32, standin)))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    "shape, starts, error, message",
    [
        ((2, COUNT + 1, WIDTH), None, ValueError, r"\(2, 6, 8\).* at most 5 positions"),
        ((2, HUGE, 0), None, ValueError, str(HUGE)),
        ((2, LENGTH, WIDTH + 1), None, ValueError, r"\(2, 3, 9\)"),
        ((LENGTH, WIDTH), None, ValueError, r"\(3, 8\)"),
        ((2, LENGTH, WIDTH), [0], ValueError, "1 starts, but 2 sequences"),
        ((2, LENGTH, WIDTH), [0, 3], ValueError, "start=3 .*5 positions"),
        ((2, LENGTH, WIDTH), [0, HUGE], ValueError, f"start={HUGE}"),
        ((2, LENGTH, WIDTH), [-1, 0], ValueError, "starts=-1"),
        ((2, LENGTH, WIDTH), [0.0, 0], TypeError, "starts=0.0"),
    ],
)
def test_positions(shape, starts, error, message):
    layer, work = bound(nn.PositionEmbedding("a", COUNT, WIDTH))
    x = np.broadcast_to(0.0, shape) if HUGE in shape else np.zeros(shape)
    with pytest.raises(error, match=message):
        layer.add_to(x, starts)
    if starts is None:
        with pytest.raises(error, match=message):
            layer.backward_positions(x, work)


LAYERS = {
    "attention": lambda: nn.CausalSelfAttention("a", WIDTH, 2),
    "rotary": lambda: nn.CausalSelfAttention("a", WIDTH, 2, nn.AttentionOptions(rotary=nn.Rotary())),
    "block": lambda: nn.Block("a", WIDTH, 2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("length, error, message", BAD_LENGTHS)
def test_lengths_of_sequences(name, length, error, message):
    layer, work = bound(LAYERS[name]())
    with pytest.raises(error, match=message):
        layer.forward(rows(), work, length)


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_has_the_lengths_of_the_forward_pass(name):
    layer, work = bound(LAYERS[name]())
    layer.forward(rows(), work, LENGTH)
    with pytest.raises(ValueError, match="length=2 .*forward pass, 3"):
        layer.backward(rows(), work, 2)


@pytest.mark.parametrize("length, error, message", BAD_LENGTHS)
def test_lengths_of_batches(length, error, message):
    with pytest.raises(error, match=message):
        Batch(INDICES, None, length)


def test_batches():
    with pytest.raises(ValueError, match=r"\(6,\), but targets_n \(5,\)"):
        Batch(INDICES, INDICES[:-1], LENGTH)
    with pytest.raises(ValueError, match="1 samples of length=3 .*6"):
        Batch(INDICES, INDICES, LENGTH, draws=Draws(0, 0, (1,), LENGTH))


@pytest.mark.parametrize("indices, error, message", BAD_INDICES[:10])
def test_tokens_and_targets_of_units(indices, error, message):
    """A unit takes what a user of it gives it; a model checks its tokens before."""
    embeddings, work = bound(nn.EmbeddingUnit(COUNT, 4, WIDTH))
    with pytest.raises(error, match="indices_n.*" + message):
        embeddings.forward(None, work, Batch(indices, INDICES, LENGTH))
    head, work = bound(nn.OutputHead(WIDTH, COUNT))
    with pytest.raises(error, match="targets_n.*" + message):
        head.forward(rows(), work, Batch(INDICES, indices, LENGTH))
    chunk = nn.GPT(vocabulary_size=COUNT, context_length=4, width=WIDTH, layers=1, heads=2).chunks[0]
    with pytest.raises(error, match=message):
        chunk.forward(None, chunk.workspace(), Batch(INDICES, indices, LENGTH))
    with pytest.raises(error, match=message):
        chunk.infer(None, chunk.workspace(), Batch(indices, None, LENGTH))


def test_units_without_targets():
    head, work = bound(nn.OutputHead(WIDTH, COUNT))
    with pytest.raises(ValueError, match="targets_n .*None"):
        head.forward(rows(), work, Batch(INDICES, None, LENGTH))
    embeddings, work = bound(nn.EmbeddingUnit(COUNT, 2, WIDTH))
    with pytest.raises(ValueError, match=r"\(2, 3, 8\) .*at most 2"):
        embeddings.forward(None, work, Batch(INDICES, None, LENGTH))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH + 1), (ROWS, WIDTH - 1), (ROWS * WIDTH,), (2, LENGTH, WIDTH)])
def test_rows_of_norms(kind, shape):
    layer, work = bound(kind("a", WIDTH))
    x, check = fenced(np.zeros(shape))
    with pytest.raises(ValueError, match="x_nc of shape|y_nc of shape|weight_c of shape"):
        layer.forward(x, work)
    check()
    layer.forward(rows(), work)
    with pytest.raises(ValueError, match=rf"\({shape[0]}, ?"):
        layer.backward(x, work)
    with pytest.raises(ValueError, match=rf"\({shape[0]}, ?"):
        layer.backward(rows(), work, residual_nc=x)
    check()


def test_rows_of_activations_and_residuals():
    layer, work = bound(nn.GELU("a"))
    for bias in (np.zeros(WIDTH - 1), np.zeros(WIDTH + 1)):
        with pytest.raises(ValueError, match=rf"bias_c of shape \({len(bias)},\)"):
            layer.forward(rows(), work, bias)
    layer.forward(rows(), work)
    with pytest.raises(ValueError, match=r"\(5, 8\)"):
        layer.backward(rows(5), work)
    linear, work = bound(nn.Linear("a", WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"residual_nc of shape \(5, 8\)"):
        linear.forward(rows(), work, rows(5))
    mlp, work = bound(nn.MLP("a", WIDTH))
    with pytest.raises(ValueError, match=r"residual_nc of shape \(6, 9\)"):
        mlp.forward(rows(), work, rows(width=9))


def test_rows_that_are_dropped():
    layer, work = bound(nn.Dropout("a", 0.5))
    work.draws = Draws(0, 0, (7,), LENGTH)
    with pytest.raises(ValueError, match="6 rows .*1 samples of length=3"):
        layer.apply(rows(), work)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda r: r.tables(WIDTH, -1, float), ValueError, "length=-1"),
        (lambda r: r.tables(WIDTH, 2.5, float), TypeError, "length=2.5"),
        (lambda r: r.tables(-2, 3, float), ValueError, "head_width=-2"),
        (lambda r: r.tables(7, 3, float), ValueError, "7 channels"),
        (lambda r: r.tables(WIDTH, 3, np.int64), TypeError, "dtype=int64"),
        (lambda r: r.rows(WIDTH, -1, 3, float), ValueError, "start=-1"),
        (lambda r: r.rows(WIDTH, 4, 3, float), ValueError, "start=4 to stop=3"),
        (lambda r: nn.RopeScaling("linear", 2.0).apply(np.ones(4), -1), ValueError, "length=-1"),
        (lambda r: nn.RopeScaling("longrope", 2, 4).apply(np.ones(4), 3), ValueError, "0 short_factors .* 4 pairs"),
    ],
)
def test_rotary_positions(call, error, message):
    with pytest.raises(error, match=message):
        call(nn.Rotary())


@pytest.mark.parametrize("shape", [(-1, 4), (4, -1), (-2, -2)])
def test_shapes_of_a_workspace(shape):
    work = nn.Workspace(float)
    work.save("a", 8), work.borrow("a", 8)
    for memory in (work.save, work.borrow):
        with pytest.raises(ValueError, match=rf"'a' of shape \({shape[0]}, {shape[1]}\) .*negative"):
            memory("a", *shape)


BAD_TOKENS = [
    (INDICES.reshape(2, 3) + COUNT, ValueError, "0 to 4"),
    (INDICES.reshape(2, 3) - 1, ValueError, "from -1"),
    (INDICES.reshape(2, 3) + HUGE, ValueError, str(HUGE)),
    (INDICES.reshape(2, 3) * 1.0, TypeError, "float64"),
    (INDICES.reshape(2, 3) > 0, TypeError, "bool"),
    (INDICES.reshape(2, 3).astype(object), TypeError, "object"),
    (np.zeros((2, COUNT), int), ValueError, "context_length is 4"),
    (INDICES, ValueError, r"\(6,\)"),
    ([[1, 2], [3]], ValueError, "inhomogeneous"),
]


@pytest.mark.parametrize("tokens, error, message", BAD_TOKENS)
@pytest.mark.parametrize("kind, options", [(nn.GPT, {}), (nn.Llama, {"key_value_heads": 1})], ids=["gpt", "llama"])
def test_tokens_of_models(kind, options, tokens, error, message):
    model = kind(vocabulary_size=COUNT, context_length=4, width=WIDTH, layers=1, heads=2, **options)
    good = np.zeros(np.shape(tokens), int) if not isinstance(tokens, list) else tokens
    calls = [
        functools.partial(call, each)
        for call, of_pairs in [(model.losses, True), (model.losses_and_gradient, True), (model.logits, False)]
        for each in ([[(tokens, good)], [(good, tokens)]] if of_pairs else [tokens])
    ]
    for call in (model.loss, model.loss_and_gradient):
        calls += [functools.partial(call, tokens, good), functools.partial(call, good, tokens)]
    for call in calls:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("tokens, error, message", BAD_TOKENS[:6])
def test_tokens_of_prompts(tokens, error, message):
    model = nn.GPT(vocabulary_size=COUNT, context_length=4, width=WIDTH, layers=1, heads=2)
    with pytest.raises(error, match=r"prompt_tokens\[0\].*" + message):
        model.generate(tokens, 2)
    for given, wrong in [
        (dict(count=-1), ValueError), (dict(count=1.0), TypeError), (dict(count=2, stop_tokens=[COUNT]), ValueError),
        (dict(count=2, stop_tokens=[-1]), ValueError), (dict(count=2, top_k=0), ValueError),
    ]:  # fmt: skip
        with pytest.raises(wrong, match="count|stop_tokens|top_k"):
            model.generate([1, 2], **given)


@pytest.mark.parametrize(
    "samples, error, message",
    [
        ([0], ValueError, r"samples .*\(1,\), .*2"),
        ([0.5, 1.0], TypeError, "samples .*got float64"),
        ([True, False], TypeError, "bool"),
        ([[0], [1]], ValueError, r"\(2, 1\)"),
        ([2**70, 0], TypeError, "object"),
    ],
)
def test_samples_of_models(samples, error, message):
    model = nn.GPT(vocabulary_size=COUNT, context_length=4, width=WIDTH, layers=1, heads=2, dropout=0.5)
    tokens = INDICES.reshape(2, 3)
    with pytest.raises(error, match=message):
        model.loss_and_gradient(tokens, tokens, samples)
    with pytest.raises(error, match=message):
        model.losses_and_gradient([(tokens, tokens, samples)])


# Parameters by whose numbers or extents memory is read or written.
FOLLOWED = {"indices_n", "targets_n", "tokens", "targets", "samples", "batches", "batch", "length", "starts", "start"}
FOLLOWED |= {"stop", "first", "out_nc", "x_btc", "dx_btc", "prompt_tokens", "residual_nc", "bias_c", "dbias_c", "shape"}
# By public class: the methods that a test above gives such numbers.
TRIED = {
    "Block": "forward backward",
    "CausalSelfAttention": "forward backward",
    "Chunk": "forward infer",
    "Decoder": "loss losses loss_and_gradient losses_and_gradient logits generate",
    "Dropout": "",
    "Embedding": "forward",
    "EmbeddingUnit": "forward predict",
    "GELU": "forward backward",
    "GatedMLP": "",
    "LayerNorm": "forward backward",
    "Linear": "",
    "MLP": "forward",
    "OutputHead": "forward",
    "PositionEmbedding": "forward add_to backward_positions",
    "RMSNorm": "forward backward",
    "RopeScaling": "apply",
    "Rotary": "rows tables",
    "TransformerBlock": "forward backward",
    "Workspace": "save borrow",
    "cross_entropy": "__call__",
}
# Those whose batch was checked by Batch and by the forward pass that comes before.
LATER = {"Chunk.backward", "Chunk.input_gradient", "Chunk.input_shape", "Chunk.output_shape", "EmbeddingUnit.backward"}
LATER |= {"OutputHead.backward", "OutputHead.predict", "GatedMLP.forward"}


def test_every_public_function_that_takes_such_numbers_is_tried():
    found = set()
    for name in nn.__all__:
        thing = getattr(nn, name)
        methods = {"__call__": thing} if not inspect.isclass(thing) else vars(thing)
        for method, function in methods.items():
            if inspect.isfunction(function) and (method == "__call__" or not method.startswith("_")):
                if FOLLOWED & set(inspect.signature(function).parameters):
                    found.add(f"{name}.{method}")
    tried = {f"{name}.{method}" for name, methods in TRIED.items() for method in methods.split()}
    assert found - tried - LATER == set()
