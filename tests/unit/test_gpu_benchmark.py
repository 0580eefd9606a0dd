"""``benchmarks/gpu.py`` where there is no GPU: every part runs at tiny sizes, and results become tables."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(output: Path, *options: str) -> dict[str, Any]:
    """The results of the command."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), str(output), *options]
    # With PYTHONSAFEPATH a script's folder is not on the path.
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "results.json").read_text())


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


@pytest.mark.full
def test_parts_of_one_process_on_numpy(tmp_path: Path) -> None:
    parts = ("facts", "bandwidth", "training", "trace", "checkpoint", "minimize", "sanitizer")
    results = run(tmp_path, "--module", "numpy", "--small", "--only", *parts)
    assert results["facts"]["versions"]["numpy"] and results["facts"]["mpi"]["library"]
    assert results["bandwidth"]["device copy"]["to_copy"] == 1
    assert results["training"]["tokens_per_second"]["mpishard"] > 0
    losses = results["training"]["turns"][0]["mpishard"]["losses"]
    assert len(losses) == 7 and all(0 < loss < 5 for loss in losses)
    assert results["training"]["turns"][0]["mpishard"]["parameters"] == results["training"]["parameters"]
    assert results["trace"]["kinds"]["mpishard"]["launches"] == 1
    assert results["checkpoint"]["stall_to_copy"] > 0 and min(results["minimize"]["seconds"].values()) > 0
    text = (tmp_path / "tables.md").read_text()
    assert all(f"## {part}" in text for part in parts) and "figures mean nothing" in text
    assert (tmp_path / "trace.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.full
def test_parts_on_ranks_on_the_stand_in(tmp_path: Path) -> None:
    results = run(tmp_path, "--module", "standin", "--small", "--only", "all_reduce", "pointers", "inverse", "memory")
    assert results["all_reduce"]["ranks"] == 2 and results["all_reduce"]["sizes"]["1024"]["to_sum_of_parts"] > 0
    pointers = results["pointers"]["ranks"]["2"]
    assert [len(pointers[kind]["apart"]) for kind in ("calls", "training", "minimize and torch")] == [48, 6, 3]
    assert not any(value for each in pointers.values() for value in each.get("apart", {}).values())
    assert len(results["inverse"]["kinds"]) == 3 if importlib.util.find_spec("torch") else 2
    memory = results["memory"]["ranks"]["2"]
    assert list(memory) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert all(each["peak"] > 0 for each in memory.values())
    # Results of an earlier run stay.
    again = run(tmp_path, "--module", "standin", "--small", "--only", "facts")
    assert again["all_reduce"] == results["all_reduce"]


def test_a_case_that_fails_ends_no_other(tools: Any, tmp_path: Path) -> None:
    of_torch = {"loss": 0.1, "scale": 1.0, "tensors": {"a": 0.1, "b": 0.0, "c": float("inf"), "d": 0.2}}
    ours = {"loss": 0.2, "scale": 1.0, "tensors": {"a": 0.3, "b": 0.0, "c": 1.0, "d": 0.2}}
    ours |= {"attention": "cuDNN", "warnings": ["slow"]}

    class Launcher:
        def child(self, name: str, setting: Any, kind: str, ranks: int) -> Any:
            if kind in ("GPT, tied/torch", "GPT/float16"):
                raise tools.Failed(f"{kind} crashed")
            if kind.endswith("/torch"):
                return {"loss of a token": 7.0, "dtypes": {"float32": of_torch}, "failures": {"bfloat16": "none"}}
            return ours

    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    results = tools.run_parts(Launcher(), setting, {"parity": partial(tools.part_parity, has_torch=True)})
    failed = {"GPT/float16", "GPT, tied/torch", "PyTorch, GPT/bfloat16", "PyTorch, Llama/bfloat16"}
    assert set(results["parity"]["failures"]) == failed
    case = results["parity"]["cases"]["GPT/float32"]
    assert case["ratios"] == {"a": pytest.approx(3), "b": 1.0, "c": 0.0, "d": 1.0} and case["worst"] == "a"
    text = (tmp_path / "tables.md").read_text()
    row = "| GPT | float32 | cuDNN | 7.000 | 2.0e-01 / 1.0e-01 | 2.5e-01 / 1.5e-01 | 1.0e+00 / inf | 3.00 | a |"
    assert row in text and "| GPT | bfloat16 | cuDNN | 7.000 | 2.0e-01 / none |" in text
    assert text.count("It warned: slow") == 1 and "GPT/float16 failed: GPT/float16 crashed" in text
    results = tools.run_parts(Launcher(), setting, {"parity": partial(tools.part_parity, has_torch=False)})
    assert "PyTorch is not installed" in tools.gpu_tables.table_of("parity", results)


def test_what_crashes_or_hangs_ends_no_other_part(tools: Any, tmp_path: Path) -> None:
    launcher = tools.Launcher(None, limit=2)
    assert launcher.run(["-c", "print(1); raise SystemExit(3)"], 0, 60) == (3, "1\n")
    code, text = launcher.run(["-c", "import time; print(2, flush=True); time.sleep(60)"], 0, 60)
    assert (code, text) == (None, "2\n")
    launcher.mpirun, launcher.limit = None, 0.01
    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    results = tools.run_parts(launcher, setting, {name: tools.PARTS[name] for name in ("all_reduce", "trace")})
    assert "no mpirun" in results["all_reduce"]["failed"]
    assert "no end within 0.01 s" in results["trace"]["failures"]["mpishard"]
    assert "failed: no mpirun" in (tmp_path / "tables.md").read_text()


def no_time(launcher: Any, setting: Any, so_far: Any) -> dict[str, Any]:
    """A part that is not started."""
    raise sys.modules["gpu_launcher"].OutOfTime("no time was left")


def half(launcher: Any, setting: Any, so_far: Any) -> dict[str, Any]:
    """The part `memory`, as far as it came."""
    so_far({"ranks": {}, "parameters": 1})
    return no_time(launcher, setting, so_far)


def no_results(launcher: Any, setting: Any, so_far: Any) -> dict[str, Any]:
    """A part that has nothing to show."""
    return {}


def test_what_no_time_was_left_for_is_for_another_call(tools: Any, tmp_path: Path) -> None:
    launcher = tools.Launcher(None, 60, within=0.05, least=0)
    assert launcher.run(["-c", "import time; time.sleep(50)"], 0, 60) == (None, "")
    with pytest.raises(tools.OutOfTime, match="no time was left"):
        launcher.run(["-c", ""], 0, 60)

    def in_halves(*given: Any) -> dict[str, Any]:
        try:
            return half(*given)
        finally:
            written.append(json.loads((tmp_path / "results.json").read_text())["memory"])

    written: list[Any] = []
    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    parts = {"bandwidth": no_results, "memory": in_halves, "trace": tools.part_trace}
    parts["checkpoint"] = tools.part_checkpoint
    results = tools.run_parts(launcher, setting, parts)
    assert written[0]["unfinished"] and results["memory"]["unfinished"]
    assert "memory did not come to its end" in (tmp_path / "tables.md").read_text()
    done = [name for name in tools.PARTS if tools.is_done(results.get(name))]
    assert done == ["bandwidth"] and "no time" in results["checkpoint"]["failed"]
    ran: list[str] = []

    def running(name: str) -> Any:
        return lambda *given: ran.append(name) or {"failed": "again"}

    options = [str(tmp_path), "--module", "numpy", "--small", "--rest", "--only", "bandwidth", "memory", "trace"]
    assert tools.main(options, {name: running(name) for name in parts}) == 1 and ran == ["memory", "trace"]


def test_a_table_of_an_earlier_run_says_so_and_when(tools: Any, tmp_path: Path, capsys: Any) -> None:
    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    copy = {"bytes": 1, "bytes_per_second": 1, "to_copy": 1}
    when = tools.run_parts(None, setting, {"bandwidth": lambda *given: {"copy": copy}})["bandwidth"]["when"]
    assert "earlier run" not in capsys.readouterr().out
    tools.run_parts(None, setting, {"bandwidth": no_time, "trace": no_time, "memory": half})
    printed = capsys.readouterr().out
    assert f"bandwidth: no time was left; what follows is of an earlier run, {when}\n\n## bandwidth" in printed
    # What this run has measured is no earlier run's, nor is a part that never ran.
    assert printed.count("earlier run") == 1
    file = tmp_path / "results.json"
    results = json.loads(file.read_text())
    del results["bandwidth"]["when"]  # as results of before were
    file.write_text(json.dumps(results))
    tools.run_parts(None, setting, {"bandwidth": no_time})
    assert "of an earlier run, which does not say when" in capsys.readouterr().out


def test_files_of_tests_that_have_ended_do_not_run_again(tools: Any, tmp_path: Path) -> None:
    setting = tools.Setting("cupy", quick=True, output=str(tmp_path))
    ran: list[tuple[str, int]] = []
    after: list[Any] = []

    def some_run(arguments: list[str], ranks: int, limit: float) -> tuple[int | None, str]:
        if ranks == 4 and not ran.count((arguments[-1], 4)):
            ran.append((arguments[-1], 4))
            raise tools.OutOfTime("no time was left")
        ran.append((arguments[-1], ranks))
        return 0, "3 passed in 2.00s\n"

    first = tools.gpu_tests.run_tests(setting, some_run, 10, so_far=after.append)
    assert len(after) == 4 and first["failures"] == ["tests/mpi/test_device.py, 4 ranks: did not run"]
    ran_before = len(ran)
    rest = tools.gpu_tests.run_tests(setting, some_run, 10, earlier=json.loads(json.dumps(first["files"])))
    assert ran[ran_before:] == [("tests/mpi/test_device.py", 4)] and not rest["failures"]
    assert rest["total"]["no launcher"] == {"passed": 6} and rest["total"]["4 ranks"] == {"passed": 3}


def test_results_stay_whole_and_of_one_kind(tools: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "results.json"
    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    parts = {"bandwidth": no_results}
    assert "bandwidth" in tools.run_parts(None, setting, parts) and tools.earlier(setting)

    def refused(*options: str) -> str:
        with pytest.raises(SystemExit) as stop:
            tools.main(options)
        assert stop.value.code == 2
        return capsys.readouterr().err

    message = f"{file} has results of --module numpy --small, not of numpy; name another folder"
    assert message in refused(str(tmp_path), "--module", "numpy")
    assert "-3 must be a number of seconds above 0" in refused(str(tmp_path), "--limit", "-3")
    assert f"cannot keep results in {file}" in refused(str(file), "--module", "numpy")
    # A disk without space leaves what is there, and says so.
    before = file.read_text()
    (tmp_path / "results.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="not all results are in"):
        tools.run_parts(None, setting, parts)
    assert file.read_text() == before and not list(tmp_path.glob("*.part"))
    assert f"cannot write {file}: [Errno 28] No space left" in capsys.readouterr().err
    file.write_text(before[:20])
    assert "results.json cannot be read" in refused(str(tmp_path), "--module", "numpy", "--small")


def test_what_is_missing_is_named_before_any_part(
    tools: Any, tmp_path: Path, environ: Callable[..., None], monkeypatch: Any
) -> None:
    if not tools.is_there("cupy"):
        with pytest.raises(SystemExit, match="not installed: cupy; .*cupy-cuda13x"):
            tools.main([str(tmp_path)])
    (tmp_path / "cupy.py").write_text("raise RuntimeError('cudaErrorInsufficientDriver: too old')\n")
    environ(PYTHONPATH=str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="no GPU .*cudaErrorInsufficientDriver: too old"):
        tools.main([str(tmp_path / "out"), "--only", "training"])
    (tmp_path / "cupy.py").write_text(
        "class cuda:\n    class runtime:\n        getDeviceCount = lambda: 1\n\n"
        "def ones(n):\n    import numpy\n    return numpy.ones(n)\n"
    )
    assert tools.without_gpu(tools.Launcher(None, 60)) == ""


def test_ctrl_c_ends_what_runs(tools: Any, tmp_path: Path) -> None:
    goes_on = threading.Event()
    texts: list[str] = []

    class Interrupted(tools.Launcher):
        def run(self, arguments: list[str], ranks: int, limit: float) -> tuple[int | None, str]:
            if "tests/unit/test_nn_device.py" in arguments:
                raise KeyboardInterrupt
            texts.append("in time" if goes_on.wait(20) else "waited for")
            return 0, ""

    setting = tools.Setting("numpy", small=True, output=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        tools.part_tests(Interrupted(None, 60), setting, print)
    goes_on.set()
    assert "waited for" not in texts
    launcher = tools.Launcher(None, 60)
    ended: list[int | None] = []
    begun = tmp_path / "begun"
    command = ["-c", f"open({str(begun)!r}, 'w'); import time; time.sleep(50)"]
    sleeper = threading.Thread(target=lambda: ended.append(launcher.run(command, 0, 60)[0]))
    sleeper.start()
    while not begun.exists() and sleeper.is_alive():
        sleeper.join(0.01)
    launcher.end()
    sleeper.join()
    assert ended == [-9]
    with pytest.raises(tools.Failed, match="the benchmark was ended"):
        launcher.run(["-c", ""], 0, 60)


def test_counts_of_tests_are_read_and_failures_named(tools: Any, tmp_path: Path) -> None:
    def some_run(arguments: list[str], ranks: int, limit: float) -> tuple[int | None, str]:
        if "tests/mpi/test_device.py" in arguments and ranks == 4:
            return None, "...."
        if "tests/unit/test_array.py" in arguments:
            return 1, "FAILED tests/unit/test_array.py::a - assert\n1 failed, 2 passed, 7 deselected in 3.2s\n"
        return 0, "== 3 passed, 1 skipped in 2.00s ==\n"

    setting = tools.Setting("cupy", quick=True, output=str(tmp_path))
    found = tools.gpu_tests.run_tests(setting, some_run, 10)
    files = [each["file"] for each in found["files"]]
    assert files == ["tests/unit/test_nn_device.py", "tests/unit/test_array.py"] + ["tests/mpi/test_device.py"] * 3
    assert found["total"]["no launcher"] == {"failed": 1, "passed": 5, "deselected": 7, "skipped": 1}
    assert found["total"]["1 ranks"] == {"passed": 3, "skipped": 1}
    alone = tools.gpu_tests.run_tests(setting, some_run, 10, why_no_ranks="no mpirun")
    assert list(alone["total"]) == ["no launcher"] and alone["failures"][0] == "no tests on ranks: no mpirun"
    skipped = tools.gpu_tests.run_tests(setting, lambda *_: (0, "9 skipped in 1s"), 10)
    assert skipped["failures"] == ["no test ran to its end: the files in tests/ of the results say why"]
    assert found["failures"] == [
        "FAILED tests/unit/test_array.py::a - assert",
        "tests/mpi/test_device.py: no end within the time limit",
    ]
    assert "| no launcher | 7 | 1 | 5 | 1 |" in tools.gpu_tables.tests(found, {})


def test_all_files_with_tests_on_a_gpu_are_found(tools: Any) -> None:
    unit, on_ranks = tools.gpu_tests.files("unit", False), tools.gpu_tests.files("mpi", False)
    assert {"tests/unit/test_rules.py", "tests/unit/test_exact.py"} <= set(unit)
    assert {"tests/mpi/test_collectives.py", "tests/mpi/test_checkpoints.py"} <= set(on_ranks)
    assert "tests/unit/test_token_data.py" not in unit


def test_kernels_of_a_trace_by_class(tools: Any) -> None:
    def event(name: str, start: float, seconds: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": 1e6 * (100 + start), "dur": 1e6 * seconds}

    events = [
        event("sm90_xmma_gemm_bf16", 0.0, 2.0),
        event("mpishard_adamw", 3.0, 1.0),
        event("Memcpy HtoD", 3.5, 1.0, "gpu_memcpy"),
        event("aten::mm", 0.0, 9.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    spans = tools.gpu_trace.device_spans(events)
    assert [span["class"] for span in spans] == ["products", "update", "rounding and copies"]
    found = tools.gpu_trace.summary(spans)
    assert (found["launches"], found["busy"], found["idle"]) == (3, pytest.approx(3.5), pytest.approx(1.0))
    assert tools.gpu_trace.summary([])["busy"] == 0


def test_the_peak_of_a_gpu_is_found_by_its_name(tools: Any) -> None:
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989, "NVIDIA L40S": 362}
    known |= {"NVIDIA L4": 121, "NVIDIA A100-SXM4-80GB": 312, "GeForce GT 710": None}
    known |= {"NVIDIA RTX A1000 Laptop GPU": None, "NVIDIA RTX A4000": None}
    assert {name: tools.gpu_machine.peak_tflops(name) for name in known} == known


def test_the_mpi_of_a_prefix_is_taken(tools: Any, tmp_path: Path, environ: Callable[..., None]) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\n")  # without the mode of a command
    given = tools.Launcher(tmp_path, 9)
    environ(PYTHONPATH=str(packages))
    for launcher in (given, tools.Launcher(None, 9)):
        assert launcher.mpirun == str(tmp_path / "bin" / "mpirun")
        assert launcher.environment["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "lib")


def test_of_intels_mpi_what_runs_is_kept_and_told_of_the_driver(
    tools: Any, tmp_path: Path, monkeypatch: Any, environ: Callable[..., None]
) -> None:
    import gpu_intel_mpi

    kept = {"bin/mpiexec.hydra": 0o755, "lib/libmpi.so.12": 0o644, "opt/mpi/etc/tuning_spr_shm.dat": 0o644}
    with zipfile.ZipFile(tmp_path / "impi_rt.whl", "w") as wheel:
        for name in (*kept, "lib/libmpi.so.12.0.0", "bin/IMB-MPI1", "opt/mpi/etc/tuning_spr_shm-ofi.dat"):
            wheel.writestr(f"impi_rt-1.data/data/{name}", "0123")
        wheel.writestr("impi_rt-1.dist-info/METADATA", "")
    assert gpu_intel_mpi.unpack(tmp_path / "impi_rt.whl", tmp_path / "impi") == 12
    found = {path for path in (tmp_path / "impi").rglob("*") if path.is_file()}
    assert {str(path.relative_to(tmp_path / "impi")): path.stat().st_mode & 0o777 for path in found} == kept
    environ(I_MPI_OFFLOAD=None, I_MPI_FABRICS=None)
    for driver in (False, True):
        monkeypatch.setattr(sys.modules["gpu_launcher"], "has_driver", lambda driver=driver: driver)
        variables = tools.Launcher(tmp_path / "impi", 9).environment
        assert (variables["I_MPI_FABRICS"], variables.get("I_MPI_OFFLOAD")) == ("shm", "1" if driver else None)
    environ(I_MPI_OFFLOAD="0")
    assert tools.Launcher(tmp_path / "impi", 9).environment["I_MPI_OFFLOAD"] == "0"


def test_a_trial_of_device_pointers_that_fails_is_shown(tools: Any, tmp_path: Path) -> None:
    class Launcher:
        environment: dict[str, str] = {}

        def run(self, arguments: list[str], ranks: int, limit: float) -> tuple[int | None, str]:
            return -11, "True\n"  # the blocking form alone

        def child(self, name: str, setting: Any, kind: str, ranks: int) -> Any:
            if kind == "copies":
                return {"by rank": [{"4096 bytes, by address": [["to the host", 0], ["to the device", 1]]}] * ranks}
            return {"exact": kind != "minimize and torch", "apart": {"one": 0.0, "other": 1e-7}}

    setting = tools.Setting("cupy", output=str(tmp_path))
    results = tools.run_parts(Launcher(), setting, {"pointers": tools.part_pointers})
    assert results["pointers"]["failed"].count("True, exit code -11") == 4
    assert Launcher.environment["I_MPI_OFFLOAD_IPC"] == "0"
    setting = tools.Setting("numpy", output=str(tmp_path / "numpy"))
    Path(setting.output).mkdir()
    failures = tools.run_parts(Launcher(), setting, {"pointers": tools.part_pointers})["pointers"]["failures"]
    assert failures["calls on 4 ranks, other"] == "apart by 1.0e-07" and len(failures) == 4
    text = (Path(setting.output) / "tables.md").read_text()
    assert "| 4 | calls | 2 | 1 | 1.0e-07 | yes |" in text and "| 4 | 3 | 4096 bytes, by address | 0 | 1 |" in text


def test_faults_that_a_sanitizer_names_are_counted(tools: Any, tmp_path: Path, monkeypatch: Any) -> None:
    class Launcher(tools.Launcher):
        def run(self, arguments: list[str], ranks: int, limit: float, under: Any = ()) -> tuple[int | None, str]:
            ends = {
                "memcheck": (0, "ERROR SUMMARY: 3 errors"),
                "racecheck": (0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
                "initcheck": (None, ""),
                "synccheck": (1, "ERROR SUMMARY: 0 errors"),
            }
            code, text = ends[under[2]]
            return code, f'{{"losses": [1.0]}}\n========= {text}\n'

    (tmp_path / "compute-sanitizer").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    setting = tools.Setting("cupy", small=True, output=str(tmp_path))
    found = tools.run_parts(Launcher(None, 9), setting, {"sanitizer": tools.PARTS["sanitizer"]})["sanitizer"]
    assert sorted(found["failures"]) == [f"{tool}, GPT/float32" for tool in ("initcheck", "memcheck", "synccheck")]
    assert "| memcheck, GPT/float32 | 3 |" in tools.gpu_tables.sanitizer(found, {})


def test_a_table_of_a_graph_says_where_a_capture_has_ended(tools: Any) -> None:
    kinds = {"loss": {"error": "CUDARuntimeError: capture", "where": "mpishard/backend/streams.py:140", "waits": []}}
    kinds |= {"passes": {"seconds": {"eager": 0.02, "graph": 0.01}, "equal": True, "waits": ["a.py:1"] * 2}}
    text = tools.gpu_tables.graph({"kinds": kinds}, {})
    assert "| CUDARuntimeError: capture | mpishard/backend/streams.py:140 |" in text
    assert "| 20.00 | 10.00 | yes |" in text and text.count("- a.py:1") == 1
