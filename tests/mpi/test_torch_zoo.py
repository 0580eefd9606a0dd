"""Modules, ways to take steps, stages of ZeRO: each step is that of one process, or refused on all ranks."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
import torch_zoo  # noqa: E402

STEPS = 2
# Under zero=2 and 3 gradients leave in the backward pass: PyTorch cannot look at them, a second pass needs `no_sync`.
REFUSED = {
    "clipped by torch": "p.grad has no values here.*call optimizer.clip_grad_norm_",
    "gan": "a second backward pass reached parameter.*within optimizer.no_sync",
    "scaler": "p.grad has no values here",
}
alone = functools.cache(torch_zoo.train_alone)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", torch_zoo.MODULES)
def test_steps_are_those_of_one_process_with_the_whole_batch(shared_mesh, capsys, name, zero):
    for way in torch_zoo.WAYS if name != "compiled" else ["plain"]:  # compiling takes seconds
        if (name, way) == ("complex", "scaler"):  # PyTorch unscales no complex gradients
            continue
        # A bucket with a parameter that nothing uses waits for the step, under zero=3 for the end of the pass only.
        if zero >= 2 and way in REFUSED and (name, way, zero) != ("unused", "gan", 2):
            with pytest.raises(RuntimeError, match=REFUSED[way]):
                torch_zoo.train(shared_mesh, name, way, zero, STEPS)
            continue
        norms, values = alone(name, way, STEPS)
        capsys.readouterr()
        own_norms, own_values = torch_zoo.train(shared_mesh, name, way, zero, STEPS)
        sums_twice = "a second backward pass" in capsys.readouterr().err
        assert sums_twice == (way == "gan" and zero < 2), way
        assert own_norms == pytest.approx(norms, rel=1e-9), way
        for each, value in values.items():
            message = f"{way}: {each}: {{}}".format
            torch.testing.assert_close(own_values[each], value, rtol=1e-9, atol=1e-11, msg=message)
