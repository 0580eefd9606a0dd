"""`map_runs`: results, order, groups, failures and resuming on any number of ranks."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time

import numpy as np
import pytest

import mpishard
from mpishard.comm.work_queue import WorkQueue


def groups_of(comm):
    return [size for size in range(1, comm.size + 1) if comm.size % size == 0]


class Sent:
    """What pickle writes and cannot read."""

    def __reduce__(self):
        return int, ("no number",)


def fit(weight, mesh):
    """The minimum of |x - 1|^2 + weight |x|^2, its misfit summed over the ranks of the group."""
    own = np.arange(4) % mesh.size == mesh.rank

    def part(x):
        residual = (x - 1) * own
        return residual @ residual + weight * (x * own) @ x, 2 * residual + 2 * weight * x * own

    return mpishard.minimize(part, np.zeros(4), mesh=mesh, reduction="sum")


@pytest.mark.quick
def test_results_are_in_order_and_the_same_for_any_groups(mesh, comm, same_on_all):
    weights = [0.0, 3.0, 0.5, 1.0, 7.0]
    alone = [fit(weight, mesh) for weight in weights]
    for size in groups_of(comm):
        results = mpishard.map_runs(fit, iter(weights), mesh, ranks_each=size)
        points = np.stack([result.x for result in results])
        assert points.tobytes() == np.stack([result.x for result in alone]).tobytes()
        np.testing.assert_allclose(points[:, 0], 1 / (1 + np.array(weights)), rtol=1e-6)
        assert same_on_all(points)


def test_a_group_is_a_mesh_of_neighbours(mesh, comm):
    size = groups_of(comm)[-1]
    for each in {1, size}:
        found = mpishard.map_runs(lambda case, own: (case, own.size, own.rank), range(7), mesh, ranks_each=each)
        assert found == [(case, each, 0) for case in range(7)]
    assert mpishard.map_runs(fit, [], mesh) == []


def test_a_free_group_takes_the_next_case(mesh, comm, folder):
    """The first case ends only when all the others are done: by another group, however many there are."""

    def run(case, own):
        if case:
            (folder / str(case)).touch()
            return mesh.rank
        while comm.size > 1 and len(os.listdir(folder)) < 6:
            time.sleep(0.001)
        return mesh.rank

    ranks = mpishard.map_runs(run, range(7), mesh)
    assert comm.size == 1 or ranks[0] not in ranks[1:]


def test_a_failed_case_is_reported_and_the_others_run(mesh, comm, capfd, same_on_all):
    def run(case, own):
        if case == 2:
            raise ZeroDivisionError("no misfit")
        own.world.raise_if_any(ValueError("of one rank") if case == 3 and own.rank == own.size - 1 else None)
        if case == 5:
            raise SystemExit(3)
        return (lambda: case) if case == 4 else Sent() if case == 7 else case

    results = mpishard.map_runs(run, range(8), mesh, ranks_each=comm.size)
    assert [results[number] for number in (0, 1, 6)] == [0, 1, 6]
    texts = {2: "ZeroDivisionError: no misfit", 3: "ValueError: ", 4: "the result, <function", 5: "SystemExit: 3"}
    for number, text in texts.items():
        assert isinstance(results[number], RuntimeError)
        assert f"cases[{number}] of 8 failed on rank" in str(results[number]) and text in str(results[number])
    assert "in run" in results[2].__notes__[0]
    assert "result of cases[7] cannot be received: ValueError: invalid literal" in str(results[7])
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("the other cases continue") == 4
    assert same_on_all(str(results[3]))


def test_a_run_that_resumes_repeats_no_case_that_is_done(mesh, comm, folder):
    called = []

    def run(case, own, fails=True):
        called.append(case["weight"])
        if fails and case["weight"] == 2.0:
            raise ValueError("not yet")
        value = np.float64(case["weight"]) * case["start"]
        result = mpishard.OptimizeResult(x=value, fun=np.float64(0.1), jac=None, message="ok", success=True)
        return result, [1, 2.5, "é", 1j], {"grid": np.arange(6, dtype=np.int32).reshape(2, 3)}, float("inf")

    cases = [{"weight": float(weight), "start": np.full(2, 1 / 3)} for weight in range(5)]
    place = folder / "runs"
    first = mpishard.map_runs(run, cases, mesh, folder=place)
    assert [isinstance(result, Exception) for result in first] == [False, False, True, False, False]
    called.clear()
    again = mpishard.map_runs(lambda case, own: run(case, own, fails=False), cases, mesh, folder=place, resume=True)
    assert sorted(sum(comm.allgather(called), [])) == [2.0]
    for number, (result, listed, named, infinite) in enumerate(again):
        assert (
            isinstance(result, mpishard.OptimizeResult) and result.x.tobytes() == (number * np.full(2, 1 / 3)).tobytes()
        )
        assert type(result.fun) is np.float64 and result.jac is None and result.success is True
        assert listed == [1, 2.5, "é", 1j] and infinite == float("inf")
        assert named["grid"].dtype == np.int32 and named["grid"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="5 of 5 cases; resume=True"):
        mpishard.map_runs(run, cases, mesh, folder=place)
    cases[1] = {"weight": 9.0, "start": 0}
    with pytest.raises(ValueError, match=r"cases\[1\]: .*weight: 1.*weight: 9"):
        mpishard.map_runs(run, cases, mesh, folder=place, resume=True)


def test_cases_may_change_the_directory(mesh, folder, monkeypatch):
    monkeypatch.chdir(folder)
    results = mpishard.map_runs(lambda case, own: os.chdir("/") or case, [1.0, 2.0, 3.0], mesh, folder="runs")
    assert results == [1.0, 2.0, 3.0]
    assert sorted(os.listdir(folder / "runs")) == ["case-0.json", "case-1.json", "case-2.json"]


def test_a_damaged_result_is_refused_and_run_again_once_it_is_removed(mesh, comm, folder):
    def resumed():
        return mpishard.map_runs(lambda case, own: np.array([case, 4.0]), [1.0, 2.0], mesh, folder=folder, resume=True)

    right = [each.tolist() for each in resumed()]
    path = folder / "case-1.json"
    sound = path.read_bytes()
    comm.Barrier()
    note = json.loads(sound)

    def with_result(result):
        from mpishard.inverse.ensemble import _hash_of

        return json.dumps(note | {"result": result, "xxh3_128": _hash_of(note["case"], result)}).encode()

    def array(**changed):
        content = dict(zip(("dtype", "shape", "data"), note["result"]["array"], strict=True)) | changed
        return with_result({"array": list(content.values())})

    # Every bit of the result and of the hash, and what a program that forges the hash can write.
    start = sound.index(b'"result"')
    damaged = [
        sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :]
        for place in range(start, len(sound), 3 if comm.size == 1 else 29)
        for bit in range(8)
    ]
    damaged += [array(dtype=None), array(shape=[-1]), array(shape=[True, 2]), array(dtype="O"), array(shape=[3])]
    damaged += [array(data="?"), with_result({"array": 3}), b"[]", b"{}"]
    damaged.append(json.dumps({name: note[name] for name in ("case", "result")}).encode())  # of earlier versions
    for content in damaged:
        if mesh.rank == 0:
            path.write_bytes(content)
        comm.Barrier()
        with pytest.raises(ValueError, match="case-1.json"):
            resumed()
    if mesh.rank == 0:
        path.unlink()
    comm.Barrier()
    assert [each.tolist() for each in resumed()] == right


def nested(depth):
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("result", "reason"),
    [({1}, "it has a set, but"), (nested(60), "nested too deep"), (nested(400), "nested too deep")],
)
def test_what_cannot_be_saved_is_returned(result, reason, mesh, comm, folder, capfd):
    results = mpishard.map_runs(lambda case, own: result, [1, 2], mesh, folder=folder)
    assert results == [result, result]
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("is not saved, and resume=True will run it again") == said.count(reason) == 2
    assert os.listdir(folder) == []


def test_without_threads_cases_are_dealt_out_in_turns(mesh, comm, monkeypatch):
    from mpishard.comm import work_queue

    monkeypatch.setattr(work_queue.MPI, "Query_thread", lambda: work_queue.MPI.THREAD_SINGLE)
    ended = []
    queue = WorkQueue(mesh.world, mesh.rank, mesh.size, 7, lambda: ended.append(mesh.rank))
    taken = [queue.take() for _ in range(9)]
    own = list(range(mesh.rank, 7, mesh.size))
    assert [number for number in taken if number >= 0] == own
    assert ended == [0] * (len(own) if mesh.rank == 0 else 0)
    assert queue.gather(mesh.rank) == list(range(mesh.size))
    assert ended == [0] * (7 if mesh.rank == 0 else 0)


def counted(text):
    """The numbers of cases that a text shows, as "3/7"."""
    return re.findall(r"\d+/\d+", text)


def test_the_first_rank_shows_how_many_cases_have_ended(mesh, comm, folder, capfd):
    def run(case, own, fails=True):
        if case == 2 and fails:
            raise ValueError("not yet")
        return case

    for each in groups_of(comm):
        mpishard.map_runs(run, range(7), mesh, ranks_each=each, progress=True)
        shown = counted(capfd.readouterr().err)
        assert (shown[:1], shown[-1:]) == ((["1/7"], ["7/7"]) if mesh.rank == 0 else ([], []))
    mpishard.map_runs(run, range(7), mesh, folder=folder / "runs", progress=False)
    assert counted(capfd.readouterr().err) == []
    mpishard.map_runs(
        lambda case, own: run(case, own, fails=False), range(7), mesh, folder=folder / "runs", resume=True
    )
    assert counted(capfd.readouterr().err) == []  # no terminal, and not asked for
    again = mpishard.map_runs(run, range(7), mesh, folder=folder / "runs", resume=True, progress=True)
    assert again == list(range(7)) and counted(capfd.readouterr().err) == []  # nothing was left to run


def test_a_run_that_resumes_shows_the_cases_before_it(mesh, comm, folder, capfd):
    mpishard.map_runs(lambda case, own: 1 / case, [1, 0, 2, 0, 4], mesh, folder=folder / "runs")
    capfd.readouterr()
    mpishard.map_runs(lambda case, own: case, [1, 0, 2, 0, 4], mesh, folder=folder / "runs", resume=True, progress=True)
    assert counted(capfd.readouterr().err) == (["4/5", "5/5"] if mesh.rank == 0 else [])


def test_on_a_terminal_the_progress_is_shown_unasked(mesh, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    mpishard.map_runs(lambda case, own: case, range(3), mesh, progress=False)
    assert sys.stderr.getvalue() == ""
    mpishard.map_runs(lambda case, own: case, range(3), mesh)
    assert ("3/3" in counted(sys.stderr.getvalue())) == (mesh.rank == 0)


def test_bad_arguments_are_an_error_on_all_ranks(mesh, comm):
    bad = comm.size - 1  # the others learn of it
    mine = comm.rank == bad
    fits = ", ".join(map(str, groups_of(comm)))
    with pytest.raises(TypeError, match="mesh=3"):
        mpishard.map_runs(fit, [1], 3)
    with pytest.raises(TypeError, match="function=5"):
        mpishard.map_runs(5 if mine else fit, [1], mesh)
    with pytest.raises(TypeError, match="cases=4 .*list of cases"):
        mpishard.map_runs(fit, 4 if mine else [1], mesh)
    with pytest.raises(ValueError, match=f"ranks_each={comm.size + 1} .*give {fits}"):
        mpishard.map_runs(fit, [1], mesh, ranks_each=comm.size + 1)
    with pytest.raises(TypeError, match="folder=3"):
        mpishard.map_runs(fit, [1], mesh, folder=3 if mine else "results")
    with pytest.raises(ValueError, match="resume=True .*folder"):
        mpishard.map_runs(fit, [1], mesh, resume=True)
    with pytest.raises(TypeError, match=r"progress='yes' must be True or False"):
        mpishard.map_runs(fit, [1], mesh, progress="yes" if mine else None)
    if comm.size > 1:
        with pytest.raises(ValueError, match="map_runs, but case 1"):
            mpishard.map_runs(fit, [1, 3 if mine else 2], mesh)
