"""What an elastic run hears from outside, without MPI: the control folder, discovery, signals, stopped processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpishard.cli.app import main
from mpishard.elastic import control as controls
from mpishard.elastic.control import Control, ControlFolder, Discovery, count_slots, request_resize
from mpishard.elastic.membership import Peer, StoppedPeerMonitor, this_process
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.io.files import NotPrivateError
from mpishard.launch.signals import Signals

pytestmark = pytest.mark.faults

LIMITS = 2, 6


def until(condition, limit=10.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(controls, "_POLL_S", 0.0)
    made = ControlFolder(tmp_path / "run")
    made.make()
    return made


@pytest.fixture
def run(folder):
    """A run that takes a step every hundredth of a second, and has at most four processes."""
    end = threading.Event()

    def go():
        control, workers, step = Control(folder, *LIMITS), 4, 0
        while not end.is_set():
            step += 1
            wanted = control.poll(workers, step)
            workers = workers if wanted is None else min(wanted, 4)
            time.sleep(0.01)
        control.close()

    thread = threading.Thread(target=go)
    thread.start()
    until(lambda: folder.standing is not None)
    yield folder.path.parent
    end.set()
    thread.join()


class TestControl:
    def test_a_request_is_taken_over_and_answered(self, run):
        answer = request_resize(run, 3, 10.0)
        assert (answer.before, answer.after) == (4, 3) and answer.step > 0
        assert request_resize(run, 6, 10.0).after == 4
        assert not (run / "control" / "request").exists()

    def test_the_command_says_what_happened(self, run, capfd):
        assert main(["resize", str(run), "2"]) == 0
        assert "4 -> 2 workers after step" in capfd.readouterr().out
        assert main(["resize", str(run), "6"]) == 0
        assert "2 -> 4 workers" in (out := capfd.readouterr().out) and "too few processes for 6" in out
        assert main(["resize", str(run), "7"]) == 2
        assert "7 workers are outside of min_workers=2 to max_workers=6" in capfd.readouterr().err
        assert main(["resize", str(run / "elsewhere"), "3"]) == 2
        assert "no elastic run in" in capfd.readouterr().err

    def test_only_the_owner_can_look_into_it(self, folder):
        folder.write("run", {})
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert (folder.path / "run").stat().st_mode & 0o777 == 0o600

    def test_a_folder_that_others_can_open_is_refused(self, folder):
        folder.path.chmod(0o755)
        with pytest.raises(ValueError, match="nobody else may open"):
            folder.make()
        with pytest.raises(ValueError, match="nobody else may open"):
            request_resize(folder.path.parent, 3, 1.0)

    def test_a_link_to_another_folder_is_refused(self, tmp_path):
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "control").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="must be a folder"):
            ControlFolder(tmp_path).make()

    def test_a_folder_of_another_user_is_refused(self, folder, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(ValueError, match="only who has started a run may use it"):
            request_resize(folder.path.parent, 3, 1.0)

    def test_a_folder_that_was_exchanged_is_not_written(self, folder, tmp_path, monkeypatch, capfd):
        """Whoever may write into the run's folder can rename what is in it."""
        control = Control(folder, *LIMITS)
        assert control.poll(4, 1) is None
        (tmp_path / "secret").write_text("mine")
        (tmp_path / "secret").chmod(0o600)
        exchanged = folder.path.rename(tmp_path / "before")
        folder.path.mkdir(mode=0o777)
        folder.path.chmod(0o777)
        for name in ("run", "request", f".run-{os.uname().nodename}-{os.getpid()}"):
            (folder.path / name).symlink_to(tmp_path / "secret")
        for step in (2, 3):
            assert control.poll(3, step) is None
        assert capfd.readouterr().err.count("somebody has exchanged the folder for requests") == 1
        assert (tmp_path / "secret").read_text() == "mine" and (exchanged / "run").exists()
        shutil.rmtree(folder.path)
        folder.path.symlink_to(exchanged)
        for use in (folder.make, folder.check, lambda: folder.write("run", {}), lambda: folder.request):
            with pytest.raises(NotPrivateError, match="must be a folder"):
                use()

    def test_a_run_that_does_not_answer_gets_no_request_later(self, folder):
        with pytest.raises(TimeoutError, match="taken back"):
            request_resize(folder.path.parent, 3, 0.1)
        assert not (folder.path / "request").exists()

    @pytest.mark.parametrize(
        "content",
        [
            "[]",
            "{}",
            "[" * 100_000,
            '{"answer": null}',
            '{"min_workers": 2, "max_workers": 6, "workers": "4", "answer": null, "taken": "", "mesh": ""}',
            '{"min_workers": 2, "max_workers": 6, "workers": 4, "answer": {"id": "x"}, "taken": "", "mesh": ""}',
        ],
    )
    def test_a_damaged_state_of_the_run_is_named(self, folder, content, capfd):
        (folder.path / "run").write_text(content)
        assert main(["resize", str(folder.path.parent), "3", "--wait", "0"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{folder.path / 'run'} is " in line

    @pytest.mark.parametrize(
        "content", ["", "{", "7", "[" * 100_000, '{"id": "x", "workers": "many"}', '{"id": "x", "workers": 99}']
    )
    def test_what_is_no_request_is_dropped(self, folder, content):
        (folder.path / "request").write_text(content)
        assert Control(folder, *LIMITS).poll(4, 1) is None
        assert not (folder.path / "request").exists()
        assert folder.standing.answer.refused

    def test_a_request_outlives_the_rank_that_read_it(self, folder):
        folder.write("request", {"id": "x", "workers": 3})
        assert Control(folder, *LIMITS).poll(4, 1) == 3
        successor = Control(folder, *LIMITS)
        assert successor.poll(4, 1) == 3
        assert successor.poll(3, 2) is None and successor.poll(3, 3) is None
        assert folder.standing.answer.after == 3

    def test_a_request_that_comes_while_another_is_carried_out_is_not_lost(self, folder):
        control = Control(folder, *LIMITS)
        folder.write("request", {"id": "x", "workers": 3})
        assert control.poll(4, 1) == 3
        folder.write("request", {"id": "y", "workers": 5})
        assert control.poll(3, 2) is None and folder.standing.answer.id == "x"
        assert control.poll(3, 3) == 5
        folder.take_back("x")
        assert folder.request == ("y", 5)
        assert control.poll(5, 4) is None and folder.standing.answer.id == "y"
        assert folder.request is None

    def test_a_request_that_waits_for_workers_gives_way_to_another(self, folder):
        control = Control(folder, *LIMITS)
        assert control.poll(4, 0) is None
        folder.write("request", {"id": "x", "workers": 6})
        assert control.poll(4, 1) == 6
        assert folder.standing.taken == "x"
        assert control.poll(4, 2, waits=True) is None and folder.standing.answer is None
        folder.write("request", {"id": "y", "workers": 3})
        assert control.poll(4, 3, waits=True) == 3
        assert folder.standing.taken == "y"
        assert control.poll(3, 4) is None
        assert (folder.standing.answer.id, folder.standing.answer.after, folder.standing.taken) == ("y", 3, "")

    def test_a_request_that_waits_for_workers_is_not_taken_back(self, folder):
        control, end = Control(folder, *LIMITS), threading.Event()

        def go():
            while not end.wait(0.01):
                control.poll(4, 1, waits=folder.standing is not None and bool(folder.standing.taken))

        thread = threading.Thread(target=go)
        thread.start()
        try:
            with pytest.raises(TimeoutError, match="continues with 4 workers until the others arrive"):
                request_resize(folder.path.parent, 6, 0.5)
        finally:
            end.set()
            thread.join()
        assert folder.request is not None

    def test_the_end_of_the_run_is_said(self, folder):
        thread = threading.Timer(0.2, Control(folder, *LIMITS).close)
        thread.start()
        with pytest.raises(FileNotFoundError, match="has ended"):
            request_resize(folder.path.parent, 3, 10.0)
        thread.join()
        assert not folder.path.exists()


class TestDiscovery:
    @pytest.mark.parametrize(
        ("text", "slots"),
        [("4\n", 4), ("a\nb\n", 2), ("a:3\n\n# b:5\nc slots=2 # two\n", 5), ("10.0.0.1:2", 2)],
    )
    def test_host_files(self, text, slots):
        assert count_slots(text) == slots

    @pytest.mark.parametrize("text", ["", "-3", "a:b", "a\na"])
    def test_what_is_no_host_file(self, text):
        with pytest.raises(ValueError):
            count_slots(text)

    def test_news_come_once(self, monkeypatch):
        monkeypatch.setattr("mpishard.elastic.control._ASK_S", 0.01)
        wanted = [3]
        discovery = Discovery(lambda: wanted[0])
        until(lambda: discovery.news() == 3)
        time.sleep(0.1)
        assert discovery.news() is None
        wanted[0] = 5
        until(lambda: discovery.news() == 5)
        discovery.close()

    def test_what_the_run_has_heard_already_is_no_news(self, monkeypatch):
        monkeypatch.setattr("mpishard.elastic.control._ASK_S", 0.01)
        wanted, asked = [3], threading.Semaphore(0)

        def ask():
            asked.release()
            return wanted[0]

        discovery = Discovery(ask)
        discovery.known = 3
        assert discovery.news() is None
        for _ in range(3):
            assert asked.acquire(timeout=10)
        assert discovery.news() is None
        wanted[0] = 4
        until(lambda: discovery.news() == 4)
        assert discovery.known == 4
        discovery.close()

    def test_a_file_a_program_and_a_failure(self, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr("mpishard.elastic.control._ASK_S", 0.01)
        path = tmp_path / "hosts"
        discovery = Discovery(path)
        until(lambda: discovery.news() is None and "No such file" in capfd.readouterr().err)
        path.write_text("a:2\nb:2\n")
        until(lambda: discovery.news() == 4)
        program = tmp_path / "program"
        program.write_text(f"#!{sys.executable}\nprint('a:7')\n")
        program.chmod(0o700)
        program.rename(path)
        until(lambda: discovery.news() == 7)
        discovery.close()


class TestSignals:
    def test_handlers_are_put_back(self):
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
        with Signals() as signals:
            assert signals.report() == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.came
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before

    def test_others_get_time_to_hear_it(self, monkeypatch):
        monkeypatch.setattr("mpishard.launch.signals._SKEW_S", 0.05)
        signals = Signals()
        signals.came = True
        assert signals.report() == 1
        time.sleep(0.06)
        assert signals.report() == 2

    def test_another_thread_takes_none(self):
        before = signal.getsignal(signal.SIGTERM)
        seen = []

        def enter():
            with Signals():
                seen.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert seen == [before]


class TestWatch:
    @pytest.fixture
    def sleepers(self):
        processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
        yield processes
        for process in processes:
            process.kill()
            process.wait()

    def peer(self, process):
        started = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[19]
        return Peer(this_process().host, process.pid, started)

    def test_one_that_is_stopped_is_ended(self, sleepers):
        stopped, running = sleepers
        with StoppedPeerMonitor(0.4) as monitor:
            monitor.follow([this_process(), *map(self.peer, sleepers)])
            stopped.send_signal(signal.SIGSTOP)
            assert stopped.wait(10) == -signal.SIGKILL
            assert running.poll() is None

    def test_one_that_goes_on_in_time_is_not(self, sleepers):
        with StoppedPeerMonitor(2.0) as monitor:
            monitor.follow(map(self.peer, sleepers))
            for _ in range(3):
                sleepers[0].send_signal(signal.SIGSTOP)
                time.sleep(0.7)
                sleepers[0].send_signal(signal.SIGCONT)
                time.sleep(0.7)
            assert sleepers[0].poll() is None

    @pytest.mark.parametrize("changes", [{"host": "another"}, {"started": "1"}])
    def test_others_of_the_same_number_are_left_alone(self, sleepers, changes):
        with StoppedPeerMonitor(0.2) as monitor:
            monitor.follow([self.peer(sleepers[0])._replace(**changes)])
            sleepers[0].send_signal(signal.SIGSTOP)
            time.sleep(0.6)
            assert sleepers[0].poll() is None


def test_a_mesh_is_asked_for(folder):
    """A run that may change its mesh, and takes whatever is asked for but tensor=3."""
    end = threading.Event()

    def go():
        control = Control(folder, *LIMITS, lambda sizes: "no tensor=3" if sizes.tensor == 3 else "")
        workers, mesh, step = 4, "data=4", 0
        while not end.is_set():
            step += 1
            wanted = control.poll(workers, step, mesh=mesh)
            if wanted is not None:
                workers, mesh = wanted.ranks, str(wanted)
            time.sleep(0.01)

    thread = threading.Thread(target=go)
    thread.start()
    until(lambda: folder.standing is not None)
    run = folder.path.parent
    try:
        answer = request_resize(run, MeshSizes(1, 2, 3), 10.0)
        assert (answer.before, answer.after, answer.mesh) == (4, 6, "tensor=2,pipeline=3")
        with pytest.raises(ValueError, match="has refused: no tensor=3"):
            request_resize(run, MeshSizes(1, 3), 10.0)
        with pytest.raises(ValueError, match="8 workers are outside"):
            request_resize(run, MeshSizes(8), 10.0)
    finally:
        end.set()
        thread.join()


def test_a_mesh_is_asked_for_of_a_run_that_keeps_its_own(run, capsys):
    with pytest.raises(ValueError, match=r"keeps the tensor and pipeline sizes .* ElasticOptimizer\(..., layouts="):
        request_resize(run, MeshSizes(1, 2), 10.0)
    assert main(["resize", str(run)]) == main(["resize", str(run), "3", "--mesh", "data=2"]) == 2
    assert "give the number of workers, or --mesh" in capsys.readouterr().err
    assert main(["resize", str(run), "--mesh", "2x2"]) == 2
    assert "data=2,tensor=2" in capsys.readouterr().err
