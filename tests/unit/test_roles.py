"""Who works and who is a spare, from the facts of all processes."""

from __future__ import annotations

import pytest

from mpishard.elastic.membership import Member, Peer, Roles


def members(posts, workers, *, leaves=(), ends=(), identities=None):
    return [
        Member(
            identity=rank if identities is None else identities[rank],
            free=len(posts) if identities is None else 1 + max(each or 0 for each in identities),
            post=post,
            workers=workers,
            leaves=rank in leaves,
            ends=rank in ends,
            lost=False,
            peer=Peer("host", 100 + rank, ""),
        )
        for rank, post in enumerate(posts)
    ]


@pytest.mark.parametrize(
    ("workers", "leaves", "ends", "ranks", "working", "able", "most"),
    [
        (3, (), (), [0, 1, 2, 3], 3, 4, 4),
        (9, (), (), [0, 1, 2, 3], 4, 4, 4),
        (4, (1,), (), [0, 2, 3, 1], 3, 3, 4),
        (2, (0, 1), (), [2, 3, 0, 1], 2, 2, 4),
        # At the end of the run those who leave work once more, to have the result; one process that knows it is enough.
        (4, (1,), (3,), [0, 2, 3, 1], 4, 3, 4),
    ],
)
def test_workers_of_one_process(workers, leaves, ends, ranks, working, able, most):
    roles = Roles.assign(members([0] * 4, workers, leaves=leaves, ends=ends), 1, 1)
    assert list(roles.ranks) == list(roles.identities) == ranks
    assert (roles.workers, roles.working, roles.able, roles.most, roles.size) == (working, working, able, most, 4)
    assert [each.number - 100 for each in roles.peers] == ranks
    assert roles.is_settled == (not any(rank in leaves for rank in ranks[:working]))


@pytest.mark.parametrize(
    ("posts", "tensor", "pipeline", "ranks", "workers"),
    [
        ([0, 1, 0, 1, 0], 2, 1, [0, 1, 2, 3, 4], 2),
        ([1, 1, 0, 0, 0], 2, 1, [2, 0, 3, 1, 4], 2),  # each process keeps its tensor rank
        ([0, 0, 1, 1], 1, 2, [0, 1, 2, 3], 2),  # the stages of all workers lie apart
        ([0, 0, 0, 1], 1, 2, [0, 3, 1, 2], 1),
        ([0, 0, 0], 1, 2, [0, 1, 2], 0),
        ([0, 1, 2, 3, 0, 1, 2, 3], 2, 2, [0, 1, 4, 5, 2, 3, 6, 7], 2),
    ],
)
def test_workers_of_several_processes(posts, tensor, pipeline, ranks, workers):
    roles = Roles.assign(members(posts, 9), tensor, pipeline)
    assert (list(roles.ranks), roles.workers) == (ranks, workers)
    assert list(roles.posts) == [posts[rank] for rank in ranks]
    assert roles.working == workers * tensor * pipeline


def test_joining_processes_get_identities_that_nobody_had():
    roles = Roles.assign(members([0] * 4, 4, identities=[5, 2, None, None]), 1, 1)
    assert roles.identities == (5, 2, 6, 7)


def test_workers_that_are_about_to_leave():
    roles = Roles.assign(members([0] * 4, 3), 1, 1)
    leaving = roles.with_leaving([False, True, False])
    assert (leaving.left, leaving.able, leaving.is_settled) == ((False, True, False, False), 3, False)
    assert leaving.with_leaving([True, False, False]).left == (True, True, False, False)
    assert (roles.able, roles.is_settled) == (4, True)
