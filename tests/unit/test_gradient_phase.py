"""The phases of a step, and what the reducer of gradients takes in each."""

from __future__ import annotations

import pytest
from gradient_recorder import Recorder

from mpishard.parameters.reducer import TRANSITIONS, GradientPhase

# By phase and call: the phase that follows, or the error.
PHASES = {
    (GradientPhase.ACCUMULATING, "gradient"): GradientPhase.ACCUMULATING,
    (GradientPhase.ACCUMULATING, "no_sync"): GradientPhase.ACCUMULATING,
    (GradientPhase.ACCUMULATING, "mark_ready"): GradientPhase.REDUCING,
    (GradientPhase.ACCUMULATING, "end_pass"): GradientPhase.REDUCING,
    (GradientPhase.ACCUMULATING, "finalize"): GradientPhase.REDUCED,
    (GradientPhase.ACCUMULATING, "reset"): GradientPhase.ACCUMULATING,
    (GradientPhase.REDUCING, "gradient"): GradientPhase.REDUCING,  # of a bucket that is not reduced yet
    (GradientPhase.REDUCING, "no_sync"): "no_sync.. comes too late",
    (GradientPhase.REDUCING, "mark_ready"): GradientPhase.REDUCING,
    (GradientPhase.REDUCING, "end_pass"): GradientPhase.REDUCING,
    (GradientPhase.REDUCING, "finalize"): GradientPhase.REDUCED,
    (GradientPhase.REDUCING, "reset"): GradientPhase.ACCUMULATING,
    (GradientPhase.REDUCED, "gradient"): "'t0' is reduced already, so another backward pass cannot add to it",
    (GradientPhase.REDUCED, "no_sync"): "no_sync.. comes too late",
    (GradientPhase.REDUCED, "mark_ready"): GradientPhase.REDUCED,
    (GradientPhase.REDUCED, "end_pass"): GradientPhase.REDUCED,
    (GradientPhase.REDUCED, "finalize"): GradientPhase.REDUCED,
    (GradientPhase.REDUCED, "reset"): GradientPhase.ACCUMULATING,
}


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize(("phase", "call"), PHASES)
def test_phases_of_a_step(phase, call, on_demand):
    """Each call in each phase; two buckets, of which the last is reduced in the phase REDUCING."""
    recorder = Recorder([2, 2], 2, on_demand=on_demand)
    gradients = recorder.gradients
    gradients.gradient("t1")
    if phase is not GradientPhase.ACCUMULATING:
        gradients.mark_ready("t1")
    if phase is GradientPhase.REDUCED:
        gradients.finalize()
    assert gradients.phase is phase

    def act():
        if call == "no_sync":
            with gradients.no_sync():
                pass
        elif call == "gradient":
            gradients.gradient("t0")
        elif call == "mark_ready":
            gradients.mark_ready("t1")
        else:
            getattr(gradients, call)()

    expected = PHASES[phase, call]
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            act()
        assert gradients.phase is phase
    else:
        act()
        assert gradients.phase is expected
        assert gradients.reduced == (expected is GradientPhase.REDUCED)
        assert recorder.resets == (call == "reset")
        steps = [GradientPhase.ACCUMULATING, GradientPhase.REDUCING, GradientPhase.REDUCED]
        passed = steps[steps.index(phase) : steps.index(expected) + 1] if call != "reset" else [phase, expected]
        assert all(one is two or (one, two) in TRANSITIONS for one, two in zip(passed[:-1], passed[1:], strict=True))
