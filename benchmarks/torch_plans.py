"""Steps of a Llama of `transformers` that two ranks cut: `mpishard.torch` against PyTorch, and against our own Llama.

    python benchmarks/torch_plans.py [--kinds K ...] [--steps N] [--repeats R] [--memory]

4 layers, width 256, 8 heads with 4 of keys and values, sequence 256, 16 sequences a step, vocabulary 256, float32,
AdamW (fused in PyTorch); 2 ranks of one thread.  PyTorch's `parallelize_module` has the plan of transformers, and gloo.

The kinds take turns as those of `torch_step.py`.  Kinds of one model begin with the same parameters and see the same
samples: their losses are compared.

--memory: each kind alone in processes of its own.  Bytes of parameters, gradients and optimizer state of a rank, by
formula, 16 bytes an element of `elements_of`, and as they are.  And by how much the resident memory of a rank has grown
since before the model was made, with activations and what libraries keep.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import children
from torch_step import LEARNING_RATE, RANKS, TIME_LIMIT, WARM_UP, given_to, options_of, process_group, show, take_turns

SEQUENCES, CONTEXT, WIDTH, LAYERS, HEADS, VOCABULARY = 16, 256, 256, 4, 8, 256
KEY_VALUE_HEADS, HIDDEN = 4, 688
MICROBATCHES = 8
MIB = 2**20
TENSOR, PIPELINE, DATA = {"tensor": 2}, {"pipeline": 2}, {"data": 2}
# By kind what it is, and its mesh.
KINDS = {
    "tensor": ("mpishard.torch, tensor=2", TENSOR),
    "pipeline": (f"mpishard.torch, pipeline=2, 1F1B, {MICROBATCHES} micro-batches", PIPELINE),
    "zb-h1": (f"mpishard.torch, pipeline=2, ZB-H1, {MICROBATCHES} micro-batches", PIPELINE),
    "data": ("mpishard.torch, data=2", DATA),
    "own-tensor": ("mpishard.nn.Llama, tensor=2", TENSOR),
    "own-pipeline": (f"mpishard.nn.Llama, pipeline=2, 1F1B, {MICROBATCHES} micro-batches", PIPELINE),
    "own-data": ("mpishard.nn.Llama, data=2", DATA),
    "torch-tensor": ("PyTorch parallelize_module (gloo)", TENSOR),
    "torch-ddp": ("PyTorch DDP (gloo)", DATA),
}
PAIRS = [
    ("tensor", "torch-tensor"),
    ("data", "torch-ddp"),
    ("tensor", "data"),
    ("pipeline", "data"),
    ("tensor", "own-tensor"),
    ("pipeline", "own-pipeline"),
    ("zb-h1", "pipeline"),
    ("data", "own-data"),
]


@dataclass(frozen=True)
class Side:
    """A kind on this rank: ``step(tokens, targets)`` returns the mean loss of its samples; `held` are bytes."""

    step: Callable[[Any, Any], float]
    held: Callable[[], int]


def make_llama() -> Any:
    """That of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, bos_token_id=0, eos_token_id=0))


def elements_of(kind: str) -> float:
    """Parameters of the rank that has most: its share of the layers that are cut, and all of the others."""
    mesh = KINDS[kind][1]
    keys = KEY_VALUE_HEADS * WIDTH // HEADS
    block = 2 * WIDTH * (WIDTH + keys) + 3 * WIDTH * HIDDEN
    words, norms = VOCABULARY * WIDTH, (2 * LAYERS + 1) * WIDTH
    if mesh is TENSOR:  # all matrices are cut, but for the embedding of PyTorch's side
        whole = words if kind.startswith("torch-") else 0
        return (LAYERS * block + 2 * words - whole) / RANKS + whole + norms
    if mesh is PIPELINE:  # the last stage has the last norm and the head
        return LAYERS * block / RANKS + words + LAYERS * WIDTH + WIDTH
    return LAYERS * block + 2 * words + norms


def loss_of(module: Any, tokens: Any, targets: Any) -> Any:
    """The mean loss of a batch, which the model computes; on tensor ranks of mpishard on the parts of its logits."""
    return module(input_ids=tokens, labels=targets, shift_labels=targets).loss


def make_side(kind: str, base: Any) -> Side:
    """A kind, on a mesh of the ranks of `base`."""
    import mpishard

    mesh = base.reshaped(**KINDS[kind][1])
    rule = mpishard.AdamW(lr=LEARNING_RATE)
    if kind.startswith("torch-"):
        return side_of_pytorch(kind)
    if kind.startswith("own-"):
        return side_of_own_llama(kind, mesh, rule)
    module = make_llama()
    schedules = {"pipeline": "1f1b", "zb-h1": "zb-h1"}
    options = {"schedule": schedules[kind], "microbatches": MICROBATCHES} if kind in schedules else {}
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, **options)

    def step(tokens: Any, targets: Any) -> float:
        optimizer.zero_grad()
        loss = optimizer.loss_and_gradient(loss_of, tokens, targets)
        optimizer.step()
        return float(loss)

    state = optimizer.optimizer.state

    def held() -> int:
        return optimizer.parameters.nbytes + state.nbytes + state.gradient_bytes

    return Side(step, held)


def side_of_own_llama(kind: str, mesh: Any, rule: Any) -> Side:
    """The Llama of mpishard, whose layouts have the same sizes."""
    import mpishard

    heads = {"heads": HEADS, "key_value_heads": KEY_VALUE_HEADS, "hidden": HIDDEN}
    options = {"microbatches": MICROBATCHES} if kind == "own-pipeline" else {}
    model = mpishard.nn.Llama(
        vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, **heads, **options, mesh=mesh
    )
    config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    optimizer = mpishard.DDPOptimizer(rule, config)

    def step(tokens: Any, targets: Any) -> float:
        loss = model.loss_and_gradient(tokens.numpy(), targets.numpy())
        optimizer.step(model.parameters, count=SEQUENCES * CONTEXT)
        return float(loss / targets.numel())

    def held() -> int:
        return model.parameters.nbytes + optimizer.state.nbytes + optimizer.state.gradient_bytes

    return Side(step, held)


def side_of_pytorch(kind: str) -> Side:
    """PyTorch alone, on the process group."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = make_llama()
    if kind == "torch-ddp":
        module = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        styles = {
            "colwise": ColwiseParallel,
            "rowwise": RowwiseParallel,
            "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        }
        plan = {pattern: styles[name]() for pattern, name in module.tp_plan.items() if name in styles}
        parallelize_module(module, init_device_mesh("cpu", (RANKS,)), plan)

    def local(tensors: Sequence[Any]) -> list[Any]:
        return [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]

    parameters = list(module.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == is_cut] for is_cut in (False, True)]
    # A fused step takes no tensors of both kinds at once.
    optimizer = torch.optim.AdamW([{"params": each} for each in kinds if each], lr=LEARNING_RATE, fused=True)

    def step(tokens: Any, targets: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(module, tokens, targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def held() -> int:
        states = [value for each in optimizer.state.values() for value in each.values() if value.dim()]
        gradients = [p.grad for p in parameters]
        return sum(each.nbytes for each in local([*parameters, *gradients, *states]))

    return Side(step, held)


def batches(kind: str, rank: int, count: int) -> Any:
    """Tokens and targets of this rank, by step."""
    import torch

    share = (rank, RANKS) if KINDS[kind][1] is DATA else (0, 1)
    return [*map(torch.from_numpy, children.batches(count, SEQUENCES, CONTEXT, VOCABULARY, *share))]


def child(kinds: list[str], steps: int) -> None:
    """One rank: steps of all kinds in turn; rank 0 prints what it has measured as a line of JSON."""
    import numpy as np

    with process_group() as mesh:
        given = {kind: batches(kind, mesh.rank, WARM_UP + steps) for kind in kinds}
        make_llama()  # transformers imports what it needs
        before = children.peak_bytes()
        sides = {kind: make_side(kind, mesh) for kind in kinds}

        def step_of(kind: str) -> Callable[[int], float]:
            tokens, targets = given[kind]
            return lambda index: sides[kind].step(tokens[index], targets[index])

        found = take_turns(mesh, {kind: step_of(kind) for kind in kinds}, steps)
        grown = children.peak_bytes() - before
        for kind in kinds:
            if KINDS[kind][1] is DATA:  # each rank has the mean of its samples
                found["losses"][kind] = (mesh.world.all_reduce(np.array(found["losses"][kind])) / RANKS).tolist()
        own = {kind: (side.held(), grown) for kind, side in sides.items()}
        most = {kind: mesh.world.all_reduce(np.array(each), op="max").tolist() for kind, each in own.items()}
        if mesh.rank == 0:
            print(json.dumps(found | {"memory": most}))


def run(what: str, kinds: list[str], steps: int) -> Any:
    """What the ranks have measured of some kinds."""
    command = [sys.executable, __file__, "--child", "--kinds", *kinds, "--steps", str(steps)]
    return children.run_on_ranks(what, command, RANKS, TIME_LIMIT)


def measure_memory(kinds: list[str], steps: int) -> None:
    """Run each kind alone, and print the memory of the rank that has most."""
    for kind in kinds:
        held, grown = (each / MIB for each in run(kind, [kind], steps)["memory"][kind])
        formula = 16 * elements_of(kind) / MIB
        print(
            f"{KINDS[kind][0]:55s} parameters, gradients and state: {formula:.1f} MiB by formula, {held:.1f} measured; "
            f"resident memory grew by {grown:.0f} MiB",
            flush=True,
        )


def main() -> None:
    parser = options_of(__doc__, list(KINDS), 3)
    parser.add_argument("--memory", action="store_true", help="measure memory in the place of time")
    arguments = given_to(parser)
    if arguments.child:
        child(arguments.kinds, arguments.steps)
        return
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"this benchmark needs {package}, which is not installed")
    print(f"on {children.processor()}")
    if arguments.memory:
        measure_memory(arguments.kinds, arguments.steps)
    else:
        runs = [run("steps", arguments.kinds, arguments.steps) for _ in range(arguments.repeats)]
        names = {kind: KINDS[kind][0] for kind in arguments.kinds}
        show(runs, names, PAIRS, [kind for kind in KINDS if kind.startswith("own-")])


if __name__ == "__main__":
    main()
