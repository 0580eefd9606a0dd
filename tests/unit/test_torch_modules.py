"""Which PyTorch modules can be trained, and what is said of the others."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mpishard

torch = pytest.importorskip("torch")
from mpishard.checkpoint.index import check_facts  # noqa: E402
from mpishard.torch import buffers as torch_buffers  # noqa: E402
from mpishard.torch import distributed, memory, module_optimizer, module_tensors, torch_rule, torch_steps  # noqa: E402
from mpishard.torch.buffers import Buffers  # noqa: E402
from mpishard.torch.module import check_unchanged, state_of  # noqa: E402
from mpishard.torch.module_tensors import ModuleTensors  # noqa: E402
from mpishard.torch.problem import problem  # noqa: E402
from mpishard.torch.torch_rule import rule_of, rule_of_optimizer  # noqa: E402


def module(**parameters):
    """A linear layer with other parameters besides."""
    made = torch.nn.Linear(3, 2)
    for name, p in parameters.items():
        made.register_parameter(name, p)
    return made


def parameter(*shape, **options):
    return torch.nn.Parameter(torch.zeros(*shape, **options))


BATCH_NORM = ".1. is a torch.nn.SyncBatchNorm, .*mpishard.torch.convert_sync"


def transposed():
    return module(t=torch.nn.Parameter(torch.zeros(3, 2).t()))


def sharing():
    memory = torch.zeros(4)
    return module(one=torch.nn.Parameter(memory[:3]), other=torch.nn.Parameter(memory[2:]))


def within(table):
    """A parameter to train in the memory of another tensor, in which another one begins before."""
    made, memory = module(), torch.zeros(4)
    getattr(made, table)["other"] = torch.nn.Parameter(memory, requires_grad=False)
    made.register_buffer("early", memory[:1])
    made.one = torch.nn.Parameter(memory[2:])
    return made


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: torch.nn.Linear, TypeError, "torch.nn.Module, got the class Linear"),
        (lambda: np.zeros(3), TypeError, "torch.nn.Module, got a ndarray"),
        (lambda: torch.nn.ReLU(), ValueError, "ReLU has no parameter to train"),
        (lambda: module().requires_grad_(False), ValueError, "2 parameters are frozen"),
        (lambda: module(c=parameter(2, dtype=torch.complex32)), TypeError, "complex128, but .c. is complex32"),
        (lambda: module().to(torch.float8_e5m2), TypeError, "'weight' is float8_e5m2"),
        (lambda: module(m=parameter(2, device="meta")), ValueError, "'m' is on the device meta"),
        (lambda: torch.nn.LazyLinear(3), ValueError, "'weight' is not initialized"),
        (transposed, ValueError, r"'t' is not contiguous: .*\(2, 3\), .*\(1, 2\)"),
        (sharing, ValueError, "'one' and 'other' .*share memory"),
        (lambda: within("_parameters"), ValueError, "'other' and 'one' share memory"),
        (lambda: within("_buffers"), ValueError, "'other' and 'one' share memory"),
        (lambda: torch.nn.Sequential(module(), torch.nn.SyncBatchNorm(2)), ValueError, BATCH_NORM),
        (
            lambda: torch.nn.Sequential(torch.nn.Embedding(3, 2, max_norm=1)),
            ValueError,
            "'0' is a .*Embedding with max_n",
        ),
        (lambda: torch.nn.EmbeddingBag(3, 2, max_norm=2.5), ValueError, "EmbeddingBag with max_norm=2.5"),
    ],
)
def test_a_module_that_cannot_be_trained_is_unchanged(make, kind, message):
    made = make()
    with pytest.raises(kind, match=message):
        ModuleTensors.of(made)


def test_an_older_pytorch_sums_no_gradients_of_another_dtype(monkeypatch):
    monkeypatch.setattr(module_tensors, "_HAS_GRAD_DTYPE", False)
    with pytest.raises(TypeError, match="'weight' is bfloat16"):
        ModuleTensors.of(module().bfloat16())
    assert ModuleTensors.of(module(c=parameter(2, dtype=torch.complex64))).trained


def test_integers_that_are_frozen_are_no_obstacle():
    made = module(table=torch.nn.Parameter(torch.arange(3), requires_grad=False))
    made.register_buffer("scratch", torch.zeros(2), persistent=False)
    made.register_buffer("steps", torch.tensor(7))
    found = ModuleTensors.of(torch.nn.Sequential(made, made))
    names = [list(each) for each in (found.trained, found.frozen, found.buffers)]
    assert names == [["0.weight", "0.bias"], ["0.table"], ["0.steps"]]


def test_names_are_those_before_compilation():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    inner[0] = torch.compile(inner[0], backend="eager")
    found = ModuleTensors.of(torch.compile(inner, backend="eager"))
    assert list(found.trained) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(found.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def of_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "bool", "int64", "complex64"])
def test_buffers_of_all_dtypes_are_saved(dtype):
    values = {"odd": [[1, 0, 3]], "scalar": 1}
    tensors = {name: torch.tensor(value).to(getattr(torch, dtype)) for name, value in values.items()}
    wanted = {name: of_bytes(tensor) for name, tensor in tensors.items()}
    buffers = Buffers(tensors, "broadcast")
    saved = buffers.facts
    for name, tensor in tensors.items():
        assert of_bytes(tensor) == wanted[name]
        tensor.zero_()
    buffers.check(saved)
    buffers.restore(saved)
    assert {name: of_bytes(tensor) for name, tensor in tensors.items()} == wanted
    with pytest.raises(ValueError, match="buffer 'odd' has . .*int8 here" if dtype == "bool" else "buffer 'odd' has"):
        buffers.check({**saved, "buffer.odd": np.zeros(2, np.int16)})


def test_buffers_of_any_name_are_saved():
    """As those in a ModuleDict, whose keys may be any text without dots."""
    names = ["1.running-mean", "a/b.seen", "<é>.seen", "json", "head.json", "-", "x\n"]
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    buffers = Buffers(tensors, "broadcast")
    saved = buffers.facts
    check_facts(saved)
    assert saved["buffer.1.running-mean"].tolist() == [0, 0]
    for tensor in tensors.values():
        tensor.zero_()
    buffers.check(saved)
    buffers.restore(saved)
    assert [tensor.tolist() for tensor in tensors.values()] == [[number] * 2 for number in range(len(names))]


@pytest.mark.parametrize(
    ("losses", "kind", "message"),
    [
        (lambda module, samples: 1.0, TypeError, "tensor, got a float"),
        (lambda module, samples: module(torch.ones(4, 3)).mean(), ValueError, r"of shape \(4,\), got shape \(\)"),
        (None, TypeError, "losses .*got NoneType"),
    ],
)
def test_losses_are_one_for_each_sample(losses, kind, message):
    with pytest.raises(kind, match=message):
        made = problem(module(), losses, samples=4, batch_size=4, steps=1)
        made.function(made.start, np.arange(4), made.start.gradients)


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Rprop", "SGD"])
def test_rules_of_pytorch_take_its_steps(name):
    """On two pieces of the parameters, with state in arrays of mpishard."""
    kind, random = getattr(torch.optim, name), np.random.default_rng(3)
    options = {"SGD": {"momentum": 0.9, "dampening": 0.5}, "Adam": {"amsgrad": True}}.get(name, {})
    rule = rule_of(kind, 0.1, **options)
    values = random.standard_normal(7)
    wanted = torch.from_numpy(values.copy())
    theirs = kind([wanted], lr=0.1, **options)
    state = [np.full(7, np.nan) for _ in rule.slots]
    for step in range(1, 5):
        gradient = random.standard_normal(7)
        wanted.grad = torch.from_numpy(gradient / 4)
        theirs.step()
        for piece in (slice(0, 3), slice(3, 7)):
            rule.update(values[piece], gradient[piece], [each[piece] for each in state], step, divisor=4.0)
    assert np.allclose(values, wanted.numpy(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "shape", "count"), [("Adafactor", (1, 5), 2), ("Adafactor", (4, 3, 2), 2), ("Odd", (3, 2), 0)]
)
def test_rules_of_whole_tensors_take_the_steps_of_pytorch(name, shape, count):
    """With state in arrays of their size; those of a flat array would be other ones."""
    kind, random = Odd if name == "Odd" else torch.optim.Adafactor, np.random.default_rng(3)
    rule, values = rule_of(kind, 0.1), random.standard_normal(shape)
    wanted = torch.from_numpy(values.copy())
    theirs = kind([wanted], lr=0.1)
    state = [np.full(values.size, np.nan) for _ in rule.slots]
    assert rule.whole_tensors and len(state) == count
    for step in range(1, 5):
        gradient = random.standard_normal(shape)
        wanted.grad = torch.from_numpy(gradient / 4)
        theirs.step()
        rule.update(values, gradient, state, step, divisor=4.0)
        torch_steps._layouts.clear()  # as in a run that continues
    assert np.allclose(values, wanted.numpy(), rtol=1e-12, atol=0)
    assert np.isfinite(state).all()


def test_options_that_change_what_is_packed_are_refused():
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        theirs = Odd(made.parameters(), how="mean")
        optimizer = mpishard.torch.as_distributed(made, mesh, theirs)
        backward(made)
        optimizer.step()
        theirs.param_groups[0]["how"] = ""
        with pytest.raises(ValueError, match=r"\[0\] of this Odd .*in place of kept"):
            optimizer.step()
        optimizer.close()
        complex_one = torch.nn.Linear(2, 2, dtype=torch.complex64)
        mpishard.torch.as_distributed(complex_one, mesh, torch.optim.NAdam(complex_one.parameters())).close()
        for rule in (torch.optim.NAdam(complex_one.parameters()), rule_of(torch.optim.Adafactor, 0.1)):
            with pytest.raises(ValueError, match="'weight' is complex, .*whole tensors"):
                mpishard.torch.as_distributed(complex_one, mesh, rule, zero=1)


def test_a_stream_of_the_user_finishes_the_step_of_a_rule(monkeypatch):
    """On a GPU CuPy sends the values, and does not wait for it."""
    finished = []
    rule, values, slots = rule_of(torch.optim.SGD, 0.1, momentum=0.9), np.ones(3), [np.full(3, np.nan)]
    monkeypatch.setattr(torch_rule, "finish_stream", lambda tensor: finished.append((tensor.clone(), slots[0].copy())))
    rule.update(values, np.ones(3), slots, 1)
    assert [(tensor.tolist(), slot.tolist()) for tensor, slot in finished] == [([0.9] * 3, [1.0] * 3)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_fused_kernels_take_divided_steps(kind):
    """Of which some optimizers note in an attribute that they can."""
    values, theirs = np.ones(3), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    rule, optimizer = rule_of(kind, 0.1, weight_decay=0.1, fused=True), kind([theirs], 0.1, weight_decay=0.1)
    slots = [np.full(3, rule.initial(name)) for name in rule.slots]
    for step in range(1, 4):
        theirs.grad = torch.arange(3.0, dtype=torch.float64) - step
        rule.update(values, theirs.grad.numpy().copy(), slots, step)
        optimizer.step()
    np.testing.assert_allclose(values, theirs.detach(), rtol=1e-14)


class Odd(torch.optim.Optimizer):
    """Steps by rows of a matrix, and something that it keeps, or that depends on all tensors."""

    def __init__(self, params, lr=0.1, how=""):
        super().__init__(params, {"lr": lr, "how": how})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            largest = max(p.grad.abs().max() for p in group["params"]) if group["how"] == "global" else 1.0
            for p in group["params"]:
                size = p.grad.norm(dim=-1, keepdim=True) if p.ndim > 1 else p.grad.abs()
                p -= group["lr"] / largest * p.grad / size
                made = {"flags": p > 0, "square": p @ p.T if p.ndim == 2 else p.sum(), "mean": p.mean()}
                self.state[p].update({"kept": made[group["how"]]} if group["how"] in made else {})


class Global(torch.optim.Optimizer):
    """Clips by the norm of all gradients, or keeps numbers of all steps, or other state of large tensors."""

    def __init__(self, params, lr=0.1, most=1e9, counts=""):
        super().__init__(params, {"lr": lr, "most": most, "counts": counts, "k": 0, "parts": torch.ones(2)})
        self.taken = 0

    @torch.no_grad()
    def step(self):
        self.taken += self.defaults["counts"] == "attribute"
        for group in self.param_groups:
            group["k"] += group["counts"] == "group"
            group["parts"] = group["parts"] + (group["counts"] == "tensor")
            norm = torch.cat([p.grad.reshape(-1) for p in group["params"]]).norm().item()
            rate = group["lr"] * min(1.0, group["most"] / norm) / (1 + group["k"] + self.taken + group["parts"][0])
            for p in group["params"]:
                p -= rate * p.grad
                if group["counts"] == "blocks" and p.numel() > 6:
                    self.state[p]["codes"] = p.to(torch.uint8)


class Averaging(Global):
    """Whose parameters are others for an evaluation."""

    def eval(self):
        """Nothing here."""


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Global, {"counts": "group", "most": 1e4}, "Global .*'k'.*zero=0"),
        (Global, {"counts": "attribute"}, "attribute 'taken'.*zero=0"),
        (Global, {"counts": "tensor"}, "param_groups.0..'parts'.*zero=0"),
        (Averaging, {"counts": "group"}, r"Averaging .*eval\(\) changes parameters.*zero=0"),
        (Global, {"counts": "blocks"}, "8 elements .*'codes'.*zero=0"),  # which the first step shows
    ],
)
def test_optimizers_whose_steps_cannot_be_divided(kind, options, message):
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        theirs = kind(made.parameters(), **options)
        with pytest.raises(ValueError, match=message):
            optimizer = mpishard.torch.as_distributed(made, mesh, theirs, zero=1)
            backward(made)
            optimizer.step()


class Normed(torch.optim.Optimizer):
    """Scales the step of a tensor by its norm, as one of layers does; `power` is in no group."""

    def __init__(self, params, lr=0.1, power=1):
        super().__init__(params, {"lr": lr})
        self.power = power

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad * (1 + p.norm()) ** self.power


def test_attributes_of_an_optimizer_decide_its_divided_steps():
    ours = module()
    theirs = copy.deepcopy(ours)
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(ours, mesh, Normed(ours.parameters(), power=3), zero=1)
        alone = Normed(theirs.parameters(), power=3)
        for each, step in ((ours, optimizer), (theirs, alone)):
            backward(each)
            step.step()
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: rule_of(Global, 0.1, counts="group"), ValueError, "Global cannot be a rule, .*'k'"),
        (lambda: rule_of(Global, 0.1, counts="tensor"), ValueError, "param_groups.0..'parts'"),
        (lambda: rule_of(Global, 0.1, counts="attribute"), ValueError, "attribute 'taken'"),
        (lambda: rule_of(Global, 0.1, most=1e4), ValueError, "depends on others.*zero=0"),
        (lambda: rule_of(Odd, 0.1, how="global"), ValueError, "Odd .*depends on others"),
        (lambda: rule_of(Odd, 0.1, how="flags"), ValueError, "keeps 'kept'"),
        (lambda: rule_of(Odd, 0.1, how="square"), ValueError, "more than 1 times"),
        (lambda: rule_of(torch.optim.LBFGS, 0.1), TypeError, "LBFGS needs 'closure'"),
        (lambda: rule_of(torch.optim.SparseAdam, 0.1), TypeError, "SparseAdam needs sparse"),
        (lambda: rule_of(torch.optim.RAdam, 0.1, beta=0.9), TypeError, "RAdam has no argument 'beta'"),
        (lambda: rule_of(torch.nn.Linear, 0.1), TypeError, "class of torch.optim"),
        (lambda: rule_of(torch.optim.RAdam, -1.0), ValueError, "lr"),
    ],
)
def test_optimizers_that_are_no_rules(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups.pop(), "'bias' .*not in the optimizer"),
        (lambda groups: groups[1].update(amsgrad=True), "max_exp_avg_sq, and param_groups.0. exp"),
        (lambda groups: groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1))), "has 1 .*: give a module"),
        (lambda groups: groups[0].pop("lr"), "has no learning rate 'lr'"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(change, message):
    made = module()
    optimizer = adamw(made)
    tensors = dict(made.named_parameters())
    rule_of_optimizer(optimizer, tensors)
    change(optimizer.param_groups)
    with pytest.raises((TypeError, ValueError), match=message):
        rule_of_optimizer(optimizer, tensors)


def adamw(made):
    return torch.optim.AdamW([{"params": [made.weight]}, {"params": [made.bias], "weight_decay": 0.0}], lr=0.1)


def adagrad(made):
    """Which makes its state before the first step."""
    return torch.optim.Adagrad([{"params": [made.weight]}, {"params": [made.bias]}], 0.1, initial_accumulator_value=0.1)


def sgd(made):
    return torch.optim.SGD([{"params": [made.bias]}, {"params": [made.weight], "momentum": 0.5}], lr=0.1, momentum=0.9)


def backward(made):
    made(torch.ones(4, 3)).square().mean().backward()


@pytest.mark.parametrize("make", [adamw, adagrad, sgd])
def test_each_group_of_an_optimizer_follows_its_own_values(make, tmp_path):
    """As in PyTorch alone: two schedules, the first from 0, and options that are set; also after a checkpoint."""
    made = [module(), module()]
    made[1].load_state_dict(made[0].state_dict())
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        for own in made:
            optimizer = theirs = make(own)
            scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, [lambda step: step / 4, lambda step: 0.5**step])
            if own is made[1]:
                optimizer = mpishard.torch.as_distributed(own, mesh, theirs)
            for step in range(5):
                if step == 2:
                    theirs.param_groups[1].update(weight_decay=0.5, eps=1e-3)
                if step == 3 and own is made[1]:
                    optimizer.save_checkpoint(tmp_path)
                    saved, state = [{**each, "params": 0} for each in theirs.param_groups], optimizer.state_dict()
                    theirs = make(own)
                    optimizer = mpishard.torch.as_distributed(own, mesh, theirs)
                    optimizer.load_state_dict(state)
                    assert [group["lr"] for group in theirs.param_groups] == [group["lr"] for group in saved]
                    theirs.param_groups[0]["lr"] = 1.0
                    optimizer.load_checkpoint(tmp_path)
                    assert [{**each, "params": 0} for each in theirs.param_groups] == saved
                    state = scheduler.state_dict()
                    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, scheduler.lr_lambdas, last_epoch=2)
                    scheduler.load_state_dict(state)
                backward(own)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for name, p in made[0].named_parameters():
        assert torch.allclose(p, made[1].get_parameter(name), atol=1e-7), name


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_parameters_may_be_scalars_or_empty(kind, zero, tmp_path):
    """Under an optimizer of PyTorch; `NAdam` keeps a number of an empty one, for which slots have no room."""
    made = [module(scale=torch.nn.Parameter(torch.tensor(0.5)), none=parameter(0, 3)) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    whole = kind(made[0].parameters())
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made[1], mesh, kind(made[1].parameters()), zero=zero)
        for step in range(3):
            for own, each in zip(made, (whole, optimizer), strict=True):
                own.zero_grad()
                (own.weight.sum() + (step + own.scale) * own.bias.sum() + own.none.sum()).backward()
                each.step()
            optimizer.save_checkpoint(tmp_path)
            optimizer.load_checkpoint(tmp_path)
        optimizer.close()
    for name, p in made[0].named_parameters():
        assert torch.allclose(p, made[1].get_parameter(name), rtol=1e-6), name


@pytest.mark.parametrize("zero", [0, 1])
def test_states_of_a_rule_are_those_of_the_optimizer_itself(zero, tmp_path):
    """Of packed state, which a rule without a module keeps in more arrays."""
    made = [module(), module()]
    made[1].load_state_dict(made[0].state_dict())
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        rule, steps = rule_of(torch.optim.Adafactor, 0.1), []
        assert rule.slots == ("state1", "state2")
        for own, kinds in zip(made, ("rule", "itself"), strict=True):
            for kind in (kinds, "itself" if kinds == "rule" else "rule"):
                given = rule if kind == "rule" else torch.optim.Adafactor(own.parameters(), lr=0.1)
                optimizer = mpishard.torch.as_distributed(own, mesh, given, zero=zero)
                assert optimizer.optimizer.rule.slots == ("state1",)
                if kind != kinds:
                    optimizer.load_checkpoint(tmp_path / kinds)
                for _ in range(2):
                    backward(own)
                    optimizer.step()
                if kind == kinds:
                    optimizer.save_checkpoint(tmp_path / kinds)
                steps.append(optimizer.optimizer.steps)
                optimizer.close()
        assert steps == [2, 4, 2, 4]
        state = optimizer.optimizer.state
        state.check(state.facts | {"slots.json": ["state1", "state2"]})  # as saved before
        with pytest.raises(ValueError, match="slots: state3"):
            state.check(state.facts | {"slots.json": ["state3"]})
    assert torch.equal(made[0].weight, made[1].weight) and torch.equal(made[0].bias, made[1].bias)


def test_what_a_loaded_state_changes_is_said(capsys):
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made, mesh, adamw(made))
        backward(made)
        optimizer.step()
        state = optimizer.state_dict()
        theirs = torch.optim.AdamW(made.parameters(), lr=0.2)
        for rule in (adamw(made), theirs, rule_of(torch.optim.AdamW, 0.3)):
            capsys.readouterr()
            optimizer = mpishard.torch.as_distributed(made, mesh, rule)
            optimizer.load_state_dict(state)
            text = capsys.readouterr().err
            if rule is theirs:
                assert "has 2 parameter groups and this AdamW 1: their learning rates and other values stay" in text
                assert "lr=0.2 in place of 0.1" in text
            else:
                assert text == ("" if isinstance(rule, torch.optim.Optimizer) else text)
                assert "betas" not in text
        assert "continues with lr=0.3 in place of 0.1" in text


@pytest.mark.parametrize(
    ("change", "zero", "message"),
    [
        (lambda theirs: theirs.add_param_group({"params": [parameter(1)]}), 0, r"of \[1, 1, 1\] .*, and had \[1, 1\]"),
        (lambda theirs: theirs.param_groups[1].update(lr=float("nan")), 0, r"lr of param_groups\[1\] .*got nan"),
        (lambda theirs: theirs.param_groups[1].update(amsgrad=True), 1, "needs max_exp_avg_sq"),
        (lambda theirs: theirs.load_state_dict(theirs.state_dict()), 0, "has got a state of its own"),
        (
            lambda theirs: theirs.state[theirs.param_groups[0]["params"][0]].update(step=1),
            1,
            "has got a state of its own",
        ),
    ],
)
def test_an_optimizer_that_was_changed_is_refused(change, zero, message):
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        theirs = adamw(made)
        optimizer = mpishard.torch.as_distributed(made, mesh, theirs, zero=zero)
        change(theirs)
        backward(made)
        with pytest.raises(ValueError, match=message):
            optimizer.step()


def test_an_optimizer_takes_no_step_by_itself():
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        theirs = adamw(made)
        optimizer = mpishard.torch.as_distributed(made, mesh, theirs, zero=2)
        settings = optimizer.optimizer.settings
        assert optimizer.param_groups is theirs.param_groups
        assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.defaults is theirs.defaults
        with pytest.raises(RuntimeError, match="cannot be added .*close"):
            optimizer.add_param_group({"params": [parameter(1)]})
        with pytest.raises(TypeError, match="cannot be copied or pickled; .*state_dict"):
            copy.deepcopy(optimizer)
        backward(made)
        with pytest.raises(RuntimeError, match="optimizer.no_sync.*optimizer.step"):
            backward(made)
        with pytest.raises(RuntimeError, match="steps of this AdamW: call step"):
            theirs.step()
        assert not settings.changed
        theirs.param_groups[1]["lr"] = 0.5
        assert settings.changed  # so that the loops of mpishard compare it
        assert settings.by_name()["lr of param_groups[1]"] == "0.5"


@pytest.mark.parametrize("make", [adamw, adagrad])
def test_an_optimizer_that_was_let_go_takes_steps_again(make):
    """In another optimizer of as_distributed, and by itself; steps of the rank's shards have left no state."""
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        theirs = make(made)
        for _ in range(2):
            optimizer = mpishard.torch.as_distributed(made, mesh, theirs, zero=1)
            backward(made)
            optimizer.step()
            optimizer.close()
    backward(made)
    if make is adamw:  # `Adagrad` needs the state that it was made with
        theirs.step()


def with_buffer():
    made = module()
    made.register_buffer("seen", torch.zeros(1))
    return made, state_of(made, ModuleTensors.of(made), "broadcast")


def test_a_tensor_in_the_place_of_a_buffer_gives_its_values():
    """As ``self.seen = self.seen + 1`` in a forward pass leaves it."""
    made, state = with_buffer()
    ours = made.seen
    made.seen = made.seen + 1
    assert state.facts["buffer.seen"].tolist() == [1]
    assert made.seen is ours
    made.seen = made.seen + 1
    state.restore({"buffer.seen": np.array([5], np.float32)})
    assert made.seen is ours and ours.tolist() == [5]
    made.register_buffer("scratch", torch.zeros(2), persistent=False)
    state.check_intact()


def test_streams_of_the_user_finish_buffers(monkeypatch):
    """On a GPU CuPy sends them, and does not wait for the copy of a tensor that was in the place of one."""
    made, state = with_buffer()
    finished = []
    monkeypatch.setattr(torch_buffers, "finish_stream", lambda tensor: finished.append(tensor.tolist()))
    made.seen = made.seen + 1
    state.check_intact()
    assert finished == [[1]]


def test_streams_of_the_user_get_what_ranks_have_spread(monkeypatch):
    """On a GPU they do not wait for CuPy."""
    waited = []
    spy = SimpleNamespace(ready=lambda array: waited.append(array.tobytes()))
    for each in (distributed, module_optimizer, memory):
        monkeypatch.setattr(each, "arrays", spy)
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made, mesh, adamw(made))
        assert waited == [optimizer.parameters.held.tobytes()]
    made = module(still=parameter(2))
    made.still.requires_grad_(False)
    axis = SimpleNamespace(size=2, broadcast=lambda array, **_: array.fill(0xFF))
    state_of(made, ModuleTensors.of(made), "local").broadcast(axis)
    assert waited[1:] == [b"\xff" * 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: setattr(made, "seen", torch.zeros(2)), r"'seen' .*\(1,\) .*\(2,\)"),
        (lambda made: setattr(made, "seen", torch.zeros(1, dtype=torch.int64)), r"int64 \(1,\) on cpu now"),
        (lambda made: delattr(made, "seen"), "buffer 'seen' is gone"),
        (lambda made: made.register_buffer("more", torch.zeros(1)), "'more' is new .*persistent"),
        (lambda made: setattr(made.weight, "data", made.weight.data.view(3, 2)), "parameter 'weight' was"),
        (lambda made: setattr(made.weight, "data", made.weight.data.view(torch.int32)), "parameter 'weight' was"),
    ],
)
def test_a_module_that_was_changed_is_refused(change, message):
    made, state = with_buffer()
    with torch.no_grad():
        made.weight.requires_grad_(False)
        change(made)
        if made.weight.dtype.is_floating_point:
            made.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=message):
        state.check_intact()
    with pytest.raises(ValueError, match=message):
        check_unchanged(made)


def test_gradients_of_another_dtype_wait_for_the_error_of_the_step():
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made, mesh, mpishard.SGD(lr=0.1))
        made.double()
        made(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        with pytest.raises(ValueError, match="parameter 'weight' was replaced"):
            optimizer.step()


@pytest.mark.parametrize("zero", [0, 2])
def test_hooks_that_come_later_change_the_gradient_that_is_taken(zero):
    made = module()
    before = made.bias.detach().clone()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made, mesh, mpishard.SGD(lr=1.0), zero=zero)
        made.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))
        made(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(made.bias.detach(), before - 2)
        made.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(RuntimeError, match="a hook on parameter 'bias' has set p.grad to None"):
            made(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("how", ["assigned", "moved"])
def test_parameters_that_are_others_now_are_neither_saved_nor_loaded(how, tmp_path):
    """The file would have those of before, and what is read from it would not come to the module."""
    made = module()
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.torch.as_distributed(made, mesh, mpishard.SGD(lr=0.1))
        optimizer.save_checkpoint(tmp_path)
        if how == "assigned":
            made.load_state_dict({name: each + 1 for name, each in made.state_dict().items()}, assign=True)
        else:
            made.weight.data = made.weight.data + 1
        for use in (optimizer.save_checkpoint, optimizer.load_checkpoint):
            with pytest.raises(ValueError, match="'weight' (is another Parameter|was replaced)"):
                use(tmp_path)


class NormWithActivation(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def test_no_batch_norm_loses_what_it_computes_or_keeps_to_its_rank():
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        made = torch.nn.Sequential(torch.nn.BatchNorm1d(3), NormWithActivation(3))
        with pytest.raises(ValueError, match="'1' is a NormWithActivation"):
            mpishard.torch.convert_sync_batchnorm(made, mesh)
        assert type(made[0]) is torch.nn.BatchNorm1d
        made[1] = made[0]
        made.add_module("none", None)
        norms = mpishard.torch.convert_sync_batchnorm(made, mesh)
        assert [type(norm).__name__ for norm in norms] == ["_OverRanks", "_OverRanks", "NoneType"]
        assert len(list(norms.parameters())) == 2
        norms[0].bias = norms[1].bias = None
        again = mpishard.torch.convert_sync_batchnorm(norms, mesh)
        assert [name for name, _ in again.named_parameters()] == ["0.weight"]
        with pytest.raises(TypeError, match="cannot be pickled.*save its state_dict"):
            pickle.dumps(copy.deepcopy(again))


class ThreeRanks:
    """The axis of rank 0 of three with equal values, but for what is added to those of the others."""

    rank, size, others = 0, 3, 0.0

    def all_reduce(self, buffer, op="sum", label=""):
        if op == "sum":
            buffer[...] += buffer + (buffer + 2 * self.others)
        elif self.others:
            buffer += 1
        return buffer


def test_equal_buffers_are_not_averaged_again():
    """By a save, which must not change the run: the rounded mean of equal numbers may be another number."""
    tensor = torch.rand(100, generator=torch.Generator().manual_seed(0))
    before, axis = tensor.clone(), ThreeRanks()
    buffers = Buffers({"x": tensor}, "average")
    buffers.synchronize(axis)
    assert not torch.equal(tensor, before)
    before = tensor.clone()
    buffers.consolidate(axis)
    assert torch.equal(tensor, before)
    axis.others = 3.0
    buffers.consolidate(axis)
    assert torch.allclose(tensor, before + 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_of_half_precision_are_averaged(dtype):
    tensor, axis = torch.arange(4).to(dtype), ThreeRanks()
    axis.others = 3.0
    Buffers({"x": tensor}, "average").synchronize(axis)
    assert torch.equal(tensor, torch.arange(2, 6).to(dtype))


def test_a_tensor_of_several_dimensions_can_be_the_start_of_a_minimisation():
    result = mpishard.minimize(lambda x: (float((x - 1) @ (x - 1)), 2 * (x - 1)), torch.zeros(2, 3))
    assert result.success and np.allclose(result.x, 1)
