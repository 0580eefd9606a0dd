"""What follows the end of a job: the end of the run, or a start of which ranks on which hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpishard.launch.job_notes import Ended, Failure, Heal, Notes
from mpishard.launch.launchers import parse_hosts
from mpishard.launch.restart_policy import JobHistory, JobOutcome, Policy, Start, Stop, decide

FAILURE = Failure("ValueError", "1.5 is bad", "train.py:7", 12)
ELASTIC = Policy(elastic=True)
SHRINKING = replace(ELASTIC, replace=False)
HOSTS = parse_hosts("a:2,b:2,c:1")


def ended_with(code, *, half_started=False, lost=False, stopped=0, healed=0, **notes):
    """How a job ended that had started, with these notes of its processes."""
    heal = Heal(healed, 0, 0.0) if healed else None
    return JobOutcome(code, Notes(**{"started": True, "heal": heal, **notes}), half_started, lost, stopped)


def replace_failure(outcome, **changes):
    return replace(outcome, notes=replace(outcome.notes, failure=replace(outcome.notes.failure, **changes)))


KILLED = ended_with(137, step=10)


def after(outcome, policy=ELASTIC, history=None, hosts=(), answering=None):
    history = history or JobHistory(4, 4)
    return decide(policy, history, outcome, hosts, hosts if answering is None else answering)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (ended_with(0, ended=Ended(0)), 0),
        (ended_with(137, ended=Ended(0)), 0),  # after a heal
        (ended_with(-9, ended=Ended(0)), 0),  # a launcher that did not end
        (ended_with(0, ended=Ended(3)), 3),
        (ended_with(3, ended=Ended(None)), 3),
        (ended_with(-11, ended=Ended(None)), 139),
        (ended_with(137, ended=Ended(None), healed=3), 0),
        (ended_with(3, ended=Ended(None), healed=3), 3),
        (ended_with(75, given_up=Ended(75)), 75),
        (ended_with(75, ended=Ended(0), given_up=Ended(75)), 75),
        (ended_with(75, ended=Ended(75), given_up=Ended(74)), 75),
        (ended_with(1, ended=Ended(0), given_up=Ended(1), failure=FAILURE, healed=3), 0),
        (ended_with(75, given_up=Ended(75), aborted=True), 75),
        (ended_with(0, ended=Ended(0), stopped=15), 0),
        (ended_with(0, stopped=15), 143),
        # stopped in order, by a signal that stands for Ctrl-C in the ranks
        (ended_with(0, ended=Ended(130), stopped=15), 143),
        (ended_with(0, ended=Ended(130), stopped=2), 130),
        (ended_with(75, ended=Ended(75), stopped=15), 75),
    ],
)
@pytest.mark.parametrize("elastic", [True, False])
def test_what_ends_a_run(outcome, code, elastic):
    follows = after(outcome, Policy(elastic=elastic))
    assert isinstance(follows, Stop) and follows.code == code


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (KILLED, 137),
        (ended_with(0), 1),
        (ended_with(-9), 137),
        (ended_with(137, failure=FAILURE), 1),
        (ended_with(0, ended=Ended(0), aborted=True), 1),
        (ended_with(0, ended=Ended(0), aborted=True, healed=3), 1),
        (ended_with(137, ended=Ended(None), aborted=True, healed=3), 137),
        (ended_with(137, started=False, half_started=True), 1),
    ],
)
def test_without_elastic_a_failure_is_the_end(outcome, code):
    follows = after(outcome, Policy())
    assert isinstance(follows, Stop) and follows.code == code and follows.why


@pytest.mark.parametrize(
    ("outcome", "changes", "ranks"),
    [
        (KILLED, {}, 4),
        (ended_with(0, step=10), {}, 4),
        (KILLED, {"replace": False}, 3),
        (ended_with(137, step=10, healed=2), {"replace": False}, 2),
        (ended_with(137, step=10, healed=2), {}, 4),
        (KILLED, {"replace": False, "multiple_of": 2}, 2),
        (KILLED, {"replace": False, "min_workers": 3}, 3),
        (ended_with(-9, step=10), {}, 4),  # the launcher was killed
        (ended_with(1, step=10, failure=FAILURE), {}, 4),
        (ended_with(1, step=10, ended=Ended(0), failure=FAILURE), {}, 4),
    ],
)
def test_ranks_that_are_left(outcome, changes, ranks):
    follows = after(outcome, replace(ELASTIC, **changes))
    assert isinstance(follows, Start) and follows.ranks == ranks


def test_too_few_ranks():
    follows = after(KILLED, replace(SHRINKING, min_workers=4))
    assert isinstance(follows, Stop) and "3 ranks remain and 4 are needed" in follows.why
    assert isinstance(after(KILLED, replace(SHRINKING, multiple_of=4)), Stop)
    assert isinstance(after(KILLED, SHRINKING, JobHistory(1, 1)), Stop)


def test_starts_that_lose_ranks_in_succession():
    """Of as many once more, since a dead process is no dead core, and then of fewer, until one gets further."""
    history, seen = JobHistory(4, 4), []
    for step in (5, 5, 5, 9, 9):
        follows = after(ended_with(137, step=step), history=history)
        assert isinstance(follows, Start)
        history = follows.history
        seen.append(follows.ranks)
    assert seen == [4, 3, 2, 4, 3]
    never = after(ended_with(137, step=0), replace(ELASTIC, min_workers=4), JobHistory(4, 4, restarts=1))
    assert isinstance(never, Start) and never.ranks == 4
    assert after(ended_with(137, step=0)).ranks == 4  # the first start of all


def test_hosts_that_are_left():
    history = JobHistory(5, 5)
    lost = after(KILLED, history=history, hosts=HOSTS, answering=HOSTS[1:])
    assert isinstance(lost, Start) and (lost.ranks, lost.hosts, lost.history.ranks) == (3, HOSTS[1:], 5)
    back = after(ended_with(137, step=11), history=lost.history, hosts=HOSTS)  # it answers again
    assert isinstance(back, Start) and (back.ranks, back.hosts) == (5, HOSTS)
    fewer = after(ended_with(137, step=11), SHRINKING, lost.history, HOSTS)
    assert isinstance(fewer, Start) and (fewer.ranks, fewer.hosts) == (4, HOSTS)
    unclear = after(ended_with(137, step=10, lost=True), history=history, hosts=HOSTS)
    assert isinstance(unclear, Start) and unclear.ranks == 5
    none = after(KILLED, history=history, hosts=HOSTS, answering=())
    assert isinstance(none, Stop) and none.code == 137


def test_only_progress_resets_the_count_of_restarts():
    history, starts = JobHistory(10, 10), []
    for step in (5, 5, 5, 9, 9, 9, 8, 9):
        follows = after(ended_with(137, step=step), history=history)
        starts.append(isinstance(follows, Start))
        if starts[-1]:
            history = follows.history
    assert starts == [True, True, True, True, True, True, False, False]
    assert isinstance(follows, Stop) and "3 restarts have brought it no further than step 9" in follows.why
    assert history.step == 9


def test_the_same_failure_twice():
    first = after(ended_with(1, step=12, failure=FAILURE))
    assert isinstance(first, Start)
    again = replace(FAILURE, message="1.6 is bad")
    assert isinstance(after(ended_with(1, step=12, failure=again), history=first.history), Stop)
    for other in (replace(FAILURE, step=13), replace(FAILURE, kind="OSError"), replace(FAILURE, where="train.py:8")):
        assert isinstance(after(ended_with(1, step=12, failure=other), history=first.history), Start)
    between = after(KILLED, history=first.history)
    assert isinstance(between, Start)
    assert isinstance(after(ended_with(1, step=12, failure=FAILURE), history=between.history), Start)


def test_what_all_ranks_were_refused_alike_is_not_tried_again():
    refused = ended_with(1, failure=replace(FAILURE, step=0, alike=True))
    follows = after(refused, hosts=HOSTS)
    assert isinstance(follows, Stop) and follows.code == 1
    assert follows.why == (
        "failed by ValueError at train.py:7 on all ranks, before any step: another start would end the same way"
    )
    # What one rank has met, what has come with a step, and what follows a loss of ranks or hosts may come otherwise.
    for other in ({"alike": False}, {"step": 1}):
        assert isinstance(after(replace_failure(refused, **other)), Start)
    assert isinstance(after(refused, history=JobHistory(4, 4, restarts=1)), Start)
    assert isinstance(after(refused, history=JobHistory(4, 4, step=3)), Start)
    assert isinstance(after(refused, hosts=HOSTS, answering=HOSTS[1:]), Start)
    assert isinstance(after(replace(refused, notes=replace(refused.notes, step=3))), Start)


def test_a_job_that_never_started():
    for policy in (ELASTIC, Policy()):
        follows = after(ended_with(127, started=False), policy)
        assert isinstance(follows, Stop) and follows.code == 127
        assert follows.why == "did not start, or its script never imported mpishard (the launcher reports 127)"
    later = after(ended_with(127, started=False), history=JobHistory(4, 4, step=3))
    assert isinstance(later, Start)
    hosts_gone = after(ended_with(1, started=False), hosts=HOSTS, answering=HOSTS[:1])
    assert isinstance(hosts_gone, Start) and hosts_gone.ranks == 2


@pytest.mark.parametrize("lost", [{"code": 137, "half_started": True}, {"code": 9}, {"code": 139}, {"code": -9}])
def test_ranks_that_die_before_they_import_mpishard(lost):
    """As others, but a second time in succession it is taken for the script's own failure."""
    lost = ended_with(started=False, **lost)
    first = after(lost)
    assert isinstance(first, Start) and first.ranks == 4
    second = after(lost, history=first.history)
    assert isinstance(second, Stop) and second.code and "the same twice" in second.why
    between = after(KILLED, history=first.history)
    assert isinstance(between, Start)
    assert isinstance(after(lost, history=between.history), Start)
    assert isinstance(after(lost, replace(ELASTIC, max_restarts=0)), Stop)


def test_a_failure_after_the_training_is_no_lost_rank():
    follows = after(ended_with(137, step=12, aborted=True, failure=replace(FAILURE, trained=True)))
    assert follows == Stop(1, "failed by ValueError at train.py:7 after its training")


@pytest.mark.parametrize("changes", [{"min_workers": 0}, {"multiple_of": 0}, {"max_restarts": -1}])
def test_senseless_policies(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Policy(**changes)
