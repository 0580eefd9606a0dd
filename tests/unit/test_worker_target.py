"""How many workers an elastic run shall have: the last request counts, whichever rank it came from."""

import pytest

from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.elastic.requests import WorkerTarget


class Asks:
    """Asks for a number of workers from outside of the script; `heard` has the arguments of each call."""

    def __init__(self, wanted):
        self._wanted = wanted

    def wanted(self, workers, step, waits, mesh):
        self.heard = workers, step, waits
        return self._wanted


@pytest.fixture
def target():
    return WorkerTarget(3, min_workers=1, max_workers=6)


def test_begins_with_its_workers(target):
    assert target.agreed_size == 3
    assert target.request == target.agreed


def test_a_request_counts_once_all_ranks_know_of_it(target):
    target.resize(5)
    assert target.agreed_size == 3
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_the_last_request_of_any_rank_is_the_largest(target):
    other = WorkerTarget(3, min_workers=1, max_workers=6)
    target.resize(6)
    for rank in (target, other):
        rank.adopt_request(max(target.request, other.request))
    other.resize(2)
    assert other.request > target.request
    target.adopt_request(other.request)
    assert target.agreed_size == 2


def test_of_two_requests_at_once_the_larger_number_counts(target):
    other = WorkerTarget(3, min_workers=1, max_workers=6)
    target.resize(2)
    other.resize(4)
    assert max(target.request, other.request) == other.request


def test_a_cap_after_deaths_is_older_than_a_request_from_before_them(target):
    target.resize(5)
    target.cap_workers(2)
    assert target.agreed_size == 2
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_a_cap_above_what_is_wanted_changes_nothing(target):
    before = target.agreed
    target.cap_workers(3)
    assert target.agreed == before


def test_a_process_that_comes_wants_nothing_and_hears_of_what_the_run_wants(target):
    comes = WorkerTarget(0, min_workers=1, max_workers=6)
    target.resize(4)
    target.adopt_request(target.request)
    comes.adopt_request(target.agreed)
    assert comes.agreed_size == 4


@pytest.mark.parametrize("workers", [0, 7])
def test_a_request_is_within_the_limits(target, workers):
    with pytest.raises(ValueError, match=rf"resize\({workers}\) is outside of min_workers=1 to max_workers=6"):
        target.resize(workers)


def test_every_worker_has_a_sample(target):
    target.most = 4
    with pytest.raises(ValueError, match=r"resize\(5\): batch_size=4 gives some of them no sample"):
        target.resize(5)
    target.resize(4)


def test_what_is_wanted_from_outside_is_a_request(target):
    requests = Asks(5)
    target.poll_requests(requests, workers=2, step=9)
    assert requests.heard == (2, 9, True)  # a third is on its way
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_nothing_wanted_from_outside_asks_for_nothing(target):
    before = target.request
    requests = Asks(None)
    target.poll_requests(requests, workers=3, step=1)
    assert (target.request, requests.heard) == (before, (3, 1, False))


def test_a_request_for_a_mesh(target):
    assert target.agreed_mesh is None
    target.resize(4, MeshSizes(1, 2, 2))
    target.adopt_request(target.request)
    assert (target.agreed_size, target.agreed_mesh) == (4, (1, 2, 2))
    target.resize(4)
    target.adopt_request(target.request)
    assert (target.agreed_size, target.agreed_mesh) == (4, None)
    target.resize(6, MeshSizes(2, 3))
    target.adopt_request(target.request)
    target.cap_workers(5)  # after a death that nobody replaces any mesh may come
    assert (target.agreed_size, target.agreed_mesh) == (5, None)
    assert target.request < 2**62
    with pytest.raises(ValueError, match="above 1023"):
        target.resize(3, MeshSizes(1, 1024))
