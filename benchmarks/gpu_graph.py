"""Part of gpu.py: which parts of a training step a CUDA graph takes, and what keeps the whole from being one.

A graph has the addresses and numbers of its capture.  Where the host waits for the device, a capture fails: with CuPy
the error and its line are shown, and on the stand-in, which captures nothing, the lines that wait.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_machine import Setting, timed
from gpu_training import WARM_UP, batches, mpishard_parts

PACKAGE = Path(__file__).resolve().parent.parent / "mpishard"
KINDS = {
    "passes": "forward and backward pass",
    "loss": "both passes, from tokens to the loss on the host",
    "update": "the update",
    "unchecked update": "the update, gradients not checked",
    "step": "a whole step",
    "unchecked step": "both passes and the update, gradients not checked, the loss not read",
}


def child(setting: Setting, kind: str) -> dict[str, Any]:
    """Capture a part, replay it, and time both ways; or say where the capture ended."""
    from mpishard.backend import array as arrays

    nonfinite = "ignore" if kind.startswith("unchecked") else "raise"
    model, optimizer = mpishard_parts(setting, nonfinite_gradients=nonfinite)
    tokens, targets = (each[0] for each in batches(setting, 1))
    moved = model._inputs.micro_batches(tokens, targets, 1)  # where they lie, a graph finds those of a later step

    def passes() -> None:
        model.parameters.reset_gradients()  # else a second pass adds to those of the first
        with model._rounded_weights():
            model.pipeline._train(moved)

    def loss() -> None:
        model.parameters.reset_gradients()
        model.loss_and_gradient(tokens, targets)

    def update() -> None:
        optimizer.step(model.parameters, count=targets.size)

    works: dict[str, list[Callable[[], None]]] = {
        "passes": [passes],
        "loss": [loss],
        "update": [update],
        "unchecked update": [update],
        "step": [loss, update],
        "unchecked step": [passes, update],
    }

    def work() -> None:
        for each in works[kind]:
            each()

    flat, gradients = model.parameters.flat, model.parameters.gradients.flat
    stream = new_stream(setting)
    with stream:
        for _ in range(WARM_UP):  # compiles, makes memory, and is past the first steps, which are always checked
            passes()
            update()
        passes()
        arrays.ready(flat)
        with Waits(setting) as waits:
            try:
                launch = captured(setting, stream, work)
            except Exception as error:  # of CuPy or CUDA
                return {"error": f"{type(error).__name__}: {error}", "where": where(error), "waits": waits.lines}
        equal = None
        if kind == "passes":
            expected = []
            for run in (work, launch):
                gradients.fill(0)
                run()
                expected.append(arrays.to_host(gradients).copy())
            equal = bool((expected[0] == expected[1]).all())
        ways = {"graph": launch} if kind.endswith("update") else {"graph": launch, "eager": work}
        seconds = {
            way: statistics.median(timed(flat, each) for _ in range(setting.repeats)) for way, each in ways.items()
        }
    return {"seconds": seconds, "equal": equal, "waits": waits.lines}


def new_stream(setting: Setting) -> Any:
    """A stream that can be captured, which CUDA's default one cannot; CuPy's memory for it is its own."""
    if setting.module != "cupy":
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def captured(setting: Setting, stream: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """Capture what `work` queues on the stream: what queues it again; without CuPy `work`, called once."""
    if setting.module != "cupy":
        work()
        return work
    stream.begin_capture()
    try:
        work()
    except Exception:
        try:
            stream.end_capture()
        except Exception as error:  # the capture is invalid by now; what ended it is the first error
            print(f"end of the capture: {error}", file=sys.stderr)
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def where(error: BaseException) -> str:
    """The lines of mpishard that an error has passed, the innermost first."""
    return " < ".join(lines(traceback.extract_tb(error.__traceback__)[::-1]))


def lines(frames: Any) -> list[str]:
    """Frames of mpishard, some at the most."""
    own = [each for each in frames if Path(each.filename).is_relative_to(PACKAGE)]
    return [f"{Path(each.filename).relative_to(PACKAGE.parent)}:{each.lineno} {each.name}" for each in own[:4]]


class Waits:
    """Notes in `lines` where the host waits for the stand-in inside of a ``with`` block; of other devices nothing."""

    def __init__(self, setting: Setting) -> None:
        self.lines: list[str] = []
        self._stream: Any = None
        if setting.module == "standin":
            import standin

            self._stream, self._run_to = standin.Stream, standin.Stream.run_to

    def __enter__(self) -> Waits:
        if self._stream is not None:

            def noted(stream: Any, number: int) -> None:
                stack = traceback.extract_stack()[::-1]
                # The stand-in calls it also for a look at an event, where a stream waits for another, for new arrays.
                if not {"pass_one", "run_to", "compute"} & {each.name for each in stack[1:]}:
                    self.lines.append(" < ".join(lines(stack)))
                self._run_to(stream, number)

            self._stream.run_to = noted
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            self._stream.run_to = self._run_to
