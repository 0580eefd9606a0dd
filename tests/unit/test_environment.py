"""The facts and findings of ``mpishard info``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from facts import GOOD, HYDRA, MPICH, OPEN_MPI, PRTE, SRUN, VERSIONS, changed, job, only

from mpishard.backend.gemm.libraries import Offer
from mpishard.cli import main
from mpishard.cli.info import rows, show
from mpishard.comm import capabilities
from mpishard.comm.capabilities import Capabilities
from mpishard.environment import Facts, findings, launch_of, launches
from mpishard.environment.facts import Gpu, _products_fast, collect_devices, gpus_of_driver
from mpishard.launch.detection import foreign_launch
from mpishard.launch.launchers import Launcher

# What ``mpishard info --json`` prints for these facts; a new fact comes at the end.
PRINTED = (
    '{"rank": 0, "ranks": 1, "host": "n1", "node": 0, "launches": [], "versions": {"mpishard": "1.0", "Python": '
    '"3.11.7", "NumPy": "2.4", "mpi4py": "4.1.2", "h5py": "3.16", "HDF5": "2.0.0"}, "mpi": {"library": "Open MPI", '
    '"version": "5.0.11", "standard": [3, 1], "threads": true, "large_counts": false, "device_buffers": false}, '
    '"mpi_text": "Open MPI v5.0.11", "thread_level": "MPI_THREAD_MULTIPLE", "heals": true, "could_heal": true, '
    '"without_han": true, "mpirun": {"path": "/opt/bin/mpirun", "family": "Open MPI", '
    '"older": false}, "mpirun_on_path": null, '
    '"mpi_path": "/opt/lib/libmpi.so.40", "h5py_mpi": false, "h5py_lacks": [], '
    '"blas": [{"library": "openblas", "version": "0.3.31", "kernels": "Haswell", "threads": 4}], '
    '"blas_chosen": "", "cores": [0, 1, 2, 3], "cpu_quota": null, "products": "", "products_chosen": "", '
    '"products_fast": "", "kernels": "/opt/kernels/znver3", "kernels_own": "", '
    '"gpus": 0, "pins_memory": false, "locked_memory": 8388608, '
    '"shared_memory": 68719476736, "shared_memory_free": 34359738368, "gpu_list": [], "gpu_of_rank": null, '
    '"driver_cuda": "", "cupy_cuda": "", "device_libraries": {}, "claims_device_buffers": false, '
    '"cupy_packages": []}'
)


def test_what_is_printed_as_json_stays() -> None:
    assert json.dumps(GOOD.flat()) == PRINTED


# What is found in made-up facts of the environment, but for those of GPUs.

WITH_MKL = {**VERSIONS, "mkl": "2026.2"}
ONE_THREAD = (replace(GOOD.processor.blas[0], threads=1),)


@pytest.mark.parametrize(
    ("environment", "launcher", "ranks"),
    [
        ({}, None, 0),
        (HYDRA, "mpirun of MPICH", 4),
        ({**HYDRA, "I_MPI_HYDRA_UUID": "773b0000"}, "mpirun of Intel MPI", 4),
        # srun --mpi=pmi2
        ({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "4"}, "srun", 4),
        # mpirun in an sbatch script on two hosts, whose processes there come by srun
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **PRTE}, "mpirun of Open MPI", 4),
        # an sbatch script itself is no step
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, 0),
        ({"OMPI_COMM_WORLD_SIZE": "many", "OMPI_COMM_WORLD_RANK": "0"}, None, 0),
    ],
)
def test_who_started_it(environment: dict[str, str], launcher: str | None, ranks: int) -> None:
    launch = launch_of(launches(environment), 1)
    assert (launch.launcher, launch.ranks) == (launcher, ranks) if launch else launcher is None


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings([GOOD]) == []
    assert findings(job(4, 4, launches=launches({**PRTE, "OMPI_COMM_WORLD_SIZE": "8"}))) == []
    both = launches({**PRTE, **HYDRA, "PMI_SIZE": "1"})  # of two launchers the one that made the world counts
    assert [launch.ranks for launch in both] == [4, 1]
    assert findings([changed(GOOD, launches=both)]) == []


@pytest.mark.parametrize(
    ("environment", "library", "is_foreign"),
    [
        (HYDRA, "Open MPI", True),
        (PRTE, "MPICH", True),
        (HYDRA, "Intel MPI", False),
        (PRTE, "Open MPI", False),
        # one inside the other
        ({**PRTE, **HYDRA}, "MPICH", False),
        # srun starts ranks of both, and what is not known is not judged
        (SRUN, "MPICH", False),
        (PRTE, "unknown", False),
        ({}, "MPICH", False),
    ],
)
def test_the_launcher_of_another_mpi(environment: dict[str, str], library: str, is_foreign: bool) -> None:
    assert (foreign_launch(launches(environment), library) is not None) is is_foreign


@pytest.mark.parametrize(
    ("mpi", "mpirun", "environment", "way_out"),
    [
        (MPICH, Launcher("/a/mpirun", "MPICH"), PRTE, "use /a/mpirun"),
        (OPEN_MPI, Launcher("/a/mpirun", "Open MPI"), HYDRA, "use /a/mpirun"),
        (OPEN_MPI, Launcher("/a/mpirun", "Open MPI"), PRTE, "of another installation, use /a/mpirun"),
        (OPEN_MPI, None, HYDRA, "use the mpirun of the Open MPI that mpi4py has loaded, by mpishard run --launcher"),
        (OPEN_MPI, None, SRUN, "srun --mpi=pmix"),
        (MPICH, None, SRUN, "srun --mpi=pmi2"),
    ],
)
def test_worlds_of_one(mpi: Capabilities, mpirun: Launcher | None, environment: dict[str, str], way_out: str) -> None:
    finding = only([changed(GOOD, mpi=mpi, mpirun=mpirun, launches=launches(environment))])
    assert (finding.level, finding.about) == ("wrong", "launch")
    assert "started 4 ranks, but each is alone in an MPI_COMM_WORLD of size 1" in finding.what
    assert f"mpi4py is bound to {mpi.library}" in finding.what and way_out in finding.way_out


def test_an_mpirun_that_does_not_fit() -> None:
    other = Launcher("/b/mpirun", "MPICH")
    finding = only([changed(GOOD, mpirun_on_path=other)])
    assert finding.level == "wrong" and "/b/mpirun" in finding.what and finding.way_out == "use /opt/bin/mpirun"
    assert "use the mpirun of the Open MPI" in only([changed(GOOD, mpirun=other)]).way_out
    # Ranks that found each other have no need of it.
    assert only(job(4, launches=launches(PRTE), mpirun_on_path=other)).level == "warning"


def test_differences_between_hosts() -> None:
    facts = job(2, 2)
    newer = [changed(each, versions={**VERSIONS, "mpishard": "1.1"}) for each in facts[2:]]
    finding = only(facts[:2] + newer)
    assert finding.level == "wrong" and finding.what == "mpishard differs: 1.0 on n1, 1.1 on n2"
    assert only(facts[:3] + [replace(facts[3], mpi=replace(OPEN_MPI, version="5.0.8"))]).level == "wrong"
    cupy = [changed(each, versions={**VERSIONS, "CuPy": "13.6"}) for each in facts[2:]]
    finding = only(facts[:2] + cupy)
    assert finding.level == "warning" and finding.what == "CuPy differs: none on n1, 13.6 on n2"
    many = [changed(each, versions={**VERSIONS, "NumPy": "2.5"}) for each in job(1, 1, 1, 1, 1)]
    assert "2.5 on n1, n2, n3 and 1 more," in only([*many[:4], replace(many[4], versions=VERSIONS)]).what


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        pytest.param(
            [changed(GOOD, mpi=replace(OPEN_MPI, threads=False), thread_level="MPI_THREAD_FUNNELED")],
            "warning",
            ["MPI_THREAD_FUNNELED", "no time limit"],
            id="threads",
        ),
        pytest.param(job(4, 6, 9), "warning", ["9 ranks share 4 cores of n3 (and 1 more host like it)"], id="cores"),
        pytest.param(
            job(4, cpu_quota=2.5), "warning", ["4 ranks share 2 cores of n1 (by a quota of CPU time)"], id="quota"
        ),
        pytest.param(
            job(4, blas_chosen="OMP_NUM_THREADS"),
            "warning",
            ["OMP_NUM_THREADS gives 4 ranks of n1 16 BLAS threads on 4 cores"],
            id="BLAS threads",
        ),
        pytest.param(
            job(8, blas_chosen="OMP_NUM_THREADS", blas=ONE_THREAD),
            "warning",
            ["8 ranks share 4 cores"],
            id="one thread",
        ),
        pytest.param(
            [
                *job(2, products_chosen="mkl", versions=WITH_MKL),
                changed(job(3, products_chosen="numpy")[2], versions=WITH_MKL),
            ],
            "wrong",
            ["MPISHARD_PRODUCTS is mkl on rank 0 and numpy on rank 2"],
            id="products chosen otherwise",
        ),
        pytest.param(job(3, products_chosen="fast"), "wrong", ["there is no library 'fast'"], id="no such library"),
        pytest.param([changed(GOOD, h5py_lacks=("gzip",))], "warning", ["no gzip"], id="HDF5 without filters"),
        pytest.param(job(4, shared_memory_free=40 * 2**20), "warning", [], id="little shared memory"),
        pytest.param(
            job(4, shared_memory_free=12 * 2**20),
            "wrong",
            ["has 12 MiB left, and MPI may take 64 MiB there for 4 ranks"],
            id="too little shared memory",
        ),
        pytest.param([changed(GOOD, heals=False)], "note", ["--with-ft ulfm --mca coll ^han"], id="does not heal"),
        pytest.param(
            [changed(GOOD, heals=False, could_heal=False, mpi=MPICH, mpirun=None)],
            "note",
            ["mpishard run --elastic"],
            id="cannot heal",
        ),
        pytest.param([changed(GOOD, without_han=False)], "warning", ["^han"], id="heals with han"),
    ],
)
def test_what_is_found(facts: list[Facts], level: str, says: list[str]) -> None:
    finding = only(facts)
    assert finding.level == level and all(part in str(finding) for part in says), finding


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param([changed(each, cores=(each.process.rank,)) for each in job(4)], id="a core for each rank"),
        pytest.param(job(4, cpu_quota=4.0), id="quota"),
        pytest.param(job(4), id="a mesh will limit the threads"),
        pytest.param(job(4, blas_chosen="OMP_NUM_THREADS", blas=ONE_THREAD), id="one thread"),
        pytest.param(job(1, blas_chosen="OMP_NUM_THREADS"), id="one rank"),
        pytest.param(job(3, products_chosen="mkl", versions=WITH_MKL), id="products"),
        pytest.param(job(4, shared_memory_free=2**30), id="shared memory"),
        pytest.param(job(4, shared_memory=None, shared_memory_free=None), id="no shared memory"),
    ],
)
def test_what_is_well(facts: list[Facts]) -> None:
    assert findings(facts) == []


def test_a_quota_of_cpu_time_counts_as_so_many_cores(capsys: pytest.CaptureFixture[str]) -> None:
    facts = job(4, cpu_quota=2.5)
    show(facts, findings(facts))
    assert "ranks 0 to 3 on 2 cores (by a quota of CPU time)" in capsys.readouterr().out
    assert only(job(1, cpu_quota=0.5, blas_chosen="OMP_NUM_THREADS")).about == "blas"


def test_libraries_for_products_that_cannot_be_had() -> None:
    ranks = job(1, 1, products_chosen="mkl", versions=WITH_MKL)
    wrong = findings([ranks[0], changed(ranks[1], versions=VERSIONS)])
    assert "MPISHARD_PRODUCTS=mkl wants mkl, which n2 lacks" in [finding.what for finding in wrong]


def test_what_is_wrong_comes_first() -> None:
    poor = {"heals": False, "blas_chosen": "OMP_NUM_THREADS", "products_chosen": "fast"}
    assert [finding.level for finding in findings(job(2, **poor))] == ["wrong", "warning", "note"]


# GPUs in the environment: what a driver says of them, and what is found in made-up facts.


def test_gpus() -> None:
    assert findings([changed(GOOD, locked_memory=0)]) == []
    with_gpu = changed(GOOD, gpus=2, locked_memory=None)
    finding = only([with_gpu])
    assert finding.level == "note" and "n1 has 2 GPUs, but this Python has no CuPy" in finding.what
    with_cupy = changed(with_gpu, versions={**VERSIONS, "CuPy": "13.6"}, pins_memory=True)
    finding = only([with_cupy])
    assert finding.level == "note" and "arrays travel through the host" in finding.what
    aware = changed(with_cupy, mpi=replace(OPEN_MPI, device_buffers=True))
    assert findings([aware]) == []
    finding = only([changed(aware, locked_memory=8 * 2**20)])
    assert finding.level == "warning" and "lock 8 MiB" in finding.what and "ulimit -l" in finding.way_out
    assert only([changed(aware, pins_memory=False)]).level == "wrong"


H100S = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, f"0{index}" * 16) for index in range(2))


def on_gpus(*ranks_on_hosts: int, **changes: Any) -> list[Facts]:
    """As `job`, on hosts with two GPUs each, CuPy, and an MPI that takes their pointers."""
    given: dict[str, Any] = {
        "gpus": 2,
        "locked_memory": None,
        "pins_memory": True,
        "gpu_list": H100S,
        "driver_cuda": "13.0",
        "cupy_cuda": "13",
        "claims_device_buffers": True,
        "versions": {**VERSIONS, "CuPy": "14.2"},
        "mpi": replace(OPEN_MPI, device_buffers=True),
        **changes,
    }
    facts = job(*ranks_on_hosts, **given)
    return [changed(each, gpu_of_rank=(each.process.rank - each.process.node) % 2) for each in facts]


def test_which_gpus() -> None:
    assert findings(on_gpus(2, 2)) == []
    shown = [value for name, value in rows(on_gpus(2))]
    assert "2 x NVIDIA H100 80GB HBM3 with 80.0 GB; driver for CUDA 13.0; one for each rank" in shown
    assert "CuPy 14.2 for CUDA 13; MPI takes device pointers" in shown
    assert "no libraries as packages; those of a CUDA toolkit are not looked for" in shown
    libraries = {"cuBLAS": "13.1", "cuDNN": "9.12", "cuDNN frontend": "1.16", "nvmath": "1.0"}
    shown = [value for name, value in rows(on_gpus(4, device_libraries=libraries))]
    assert any(value.endswith("; 4 ranks on 2") for value in shown)
    assert "cuBLAS 13.1 (products); cuDNN 9.12; cuDNN frontend 1.16 (attention); nvmath 1.0 (epilogues)" in shown
    staged = on_gpus(2, mpi=OPEN_MPI, claims_device_buffers=False)
    assert any("arrays travel through pinned host memory" in value for name, value in rows(staged))
    without = on_gpus(2, versions=VERSIONS, cupy_cuda="", pins_memory=False)
    assert "no CuPy" in [value for name, value in rows(without)]
    assert only(without).way_out == "to compute there, pip install 'mpishard[cuda13x]', as its driver needs"


def test_a_cupy_that_is_too_new_for_the_driver() -> None:
    finding = only(on_gpus(2, driver_cuda="12.4", pins_memory=False))
    assert (finding.level, finding.about) == ("wrong", "gpu")
    assert finding.what == "CuPy 14.2 is for CUDA 13, but the driver of n1 takes CUDA 12.4 at most"
    assert "pip uninstall cupy-cuda13x, then pip install 'mpishard[cuda12x]'" in finding.way_out
    assert findings(on_gpus(2, cupy_cuda="12")) == []  # drivers take what is older


def test_two_cupys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("mpishard.environment.facts.device_libraries", dict)
    devices = collect_devices(1, 0, False)
    assert devices.cupy_packages == ("cupy-cuda13x", "cupy-cuda12x") and devices.cupy_cuda == "13"
    # Whether the files are those of the older one is not known, so that CuPy is not said to be too new for the driver.
    finding = only(on_gpus(2, cupy_packages=devices.cupy_packages, driver_cuda="12.4"))
    assert (finding.level, finding.about) == ("warning", "gpu")
    assert finding.what == "cupy-cuda13x and cupy-cuda12x are installed at once, and each overwrites files of the other"
    assert finding.way_out == (
        "pip uninstall cupy-cuda13x cupy-cuda12x, then pip install 'mpishard[cuda12x]', as its driver needs"
    )
    del installed["cupy-cuda13x"]
    devices = collect_devices(1, 0, False)
    assert devices.cupy_packages == ("cupy-cuda12x",) and devices.cupy_cuda == "12"
    assert findings(on_gpus(2, cupy_packages=devices.cupy_packages)) == []


def test_gpus_that_mpi_cannot_take() -> None:
    finding = only(on_gpus(2, mpi=OPEN_MPI))
    assert finding.level == "warning"
    assert "Open MPI says that it takes device pointers, but a trial of it on n1 failed" in finding.what
    assert findings(on_gpus(2, 2)) == findings(on_gpus(3)) == []


class Driver:
    """A driver with two GPUs, some of whose functions may refuse."""

    def __init__(self, *refusing: str) -> None:
        self.refusing = refusing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuInit":
                assert arguments == (0,)
            elif name == "cuDeviceGetName":
                arguments[0].value = f"GPU {arguments[2].value}".encode()
            elif name == "cuDeviceGetUuid":
                arguments[0].raw = bytes([arguments[1].value] * 16)
            else:
                index = arguments[1] if name == "cuDeviceGet" else None
                answers = {"cuDriverGetVersion": 12040, "cuDeviceGetCount": 2, "cuDeviceTotalMem_v2": 2**36}
                arguments[0]._obj.value = answers.get(name, index)
            return int(name in self.refusing)

        return call


def test_what_a_driver_says() -> None:
    gpus, version = gpus_of_driver(Driver())
    assert version == "12.4"
    assert gpus == tuple(Gpu(f"GPU {index}", 2**36, f"0{index}" * 16) for index in range(2))
    assert gpus_of_driver(Driver("cuDeviceGetCount")) == ((), "12.4")
    assert gpus_of_driver(Driver("cuDeviceGetUuid")) == ((), "12.4")
    assert gpus_of_driver(Driver("cuInit")) == ((), "")


def test_nothing_is_asked_about_gpus_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpishard.environment.facts.device_libraries", lambda: pytest.fail("was asked"))
    assert collect_devices(0, 0, False) == GOOD.devices


# ``mpishard info``: what it shows of made-up facts, and the command on one rank.


@pytest.mark.parametrize(
    ("products", "fast", "chosen", "shown"),
    [
        ("numpy", "numpy", "", "by BLAS; no other library is known to be faster on this processor"),
        (
            "numpy",
            "bfloat16=onednn,float32=mkl",
            "",
            "by BLAS; pip install 'mpishard[fast]' brings what is faster on this processor, mkl: float32; "
            "onednn: bfloat16",
        ),
        (
            "float32=mkl",
            "bfloat16=onednn,float32=mkl",
            "",
            "mkl: float32; pip install 'mpishard[fast]' brings what is faster on this processor, mkl: float32; "
            "onednn: bfloat16",
        ),
        ("numpy", "float32=mkl", "numpy", "by BLAS, chosen by MPISHARD_PRODUCTS"),
        ("float32.plain=mkl,bfloat16.plain=onednn", "", "", "mkl: float32.plain; onednn: bfloat16.plain"),
        ("float32=mkl", "float32=mkl", "float32=mkl", "mkl: float32, chosen by MPISHARD_PRODUCTS"),
    ],
)
def test_libraries_for_products(products: str, fast: str, chosen: str, shown: str) -> None:
    given = dict(products=products, products_chosen=chosen, products_fast=fast)
    facts = replace(GOOD, processor=replace(GOOD.processor, **given))
    assert dict(rows([facts]))["products"] == shown


@pytest.mark.parametrize(
    ("machine", "intel", "bfloat16", "expected"),
    [
        ("x86_64", True, True, "bfloat16=onednn,float32=mkl,float64=mkl"),
        ("x86_64", False, False, "numpy"),
        ("aarch64", False, False, ""),
    ],
)
def test_what_the_extra_fast_would_do(machine: str, intel: bool, bfloat16: bool, expected: str) -> None:
    assert _products_fast(machine, Offer({}, intel, bfloat16)) == expected


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"kernels_own": "/home/a"}, "for this processor, in /opt/kernels/znver3"),
        ({"kernels": "", "kernels_own": "/home/a"}, "at their first call, and kept in folders such as /home/a"),
        ({"kernels": ""}, "by each process, as no folder can be written: mpishard compile --into FOLDER"),
    ],
)
def test_where_kernels_are(given: dict[str, str], shown: str) -> None:
    assert dict(rows([changed(GOOD, **given)]))["kernels"] == f"compiled {shown}"


@pytest.mark.parametrize("columns", [60, 80])
def test_the_screen_fits(columns: int, capsys: pytest.CaptureFixture[str], environ: Callable[..., None]) -> None:
    environ(COLUMNS=str(columns))
    poor = {
        "gpus": 8,
        "mpirun_on_path": Launcher("/b/mpirun", "MPICH"),
        "shared_memory_free": 0,
        "blas_chosen": "OPENBLAS_NUM_THREADS",
    }
    facts = job(*[8] * 20, heals=False, versions={**VERSIONS, "CuPy": "13.6.0"}, **poor)
    found = findings(facts)
    show(facts, found)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    whole = " ".join(text.split())
    assert all(f"{finding.level} {finding}" in whole for finding in found)
    assert "n6: ranks 40 to 47 on 4 cores" in whole and "and 14 more with 112 ranks" in whole
    assert whole.endswith("3 things are wrong, with 3 warnings.")


def test_a_good_job_fits_an_old_terminal(capsys: pytest.CaptureFixture[str], environ: Callable[..., None]) -> None:
    environ(COLUMNS="80")
    facts = job(*[4] * 20, launches=launches({**PRTE, "OMPI_COMM_WORLD_SIZE": "80"}))
    show(facts, findings(facts))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Nothing is wrong."
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_alone(capsys: pytest.CaptureFixture[str], environ: Callable[..., None]) -> None:
    environ(**dict.fromkeys((*HYDRA, *PRTE, *SRUN)), COLUMNS="80")
    environ(PATH="")  # which may have the mpirun of another MPI
    code = main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["wrong", "findings", "ranks"]
    assert code == int(report["wrong"])
    (rank,) = report["ranks"]
    assert list(rank) == list(GOOD.flat())
    assert {"mpishard", "Python", "NumPy", "mpi4py", "h5py", "HDF5"} <= set(rank["versions"])
    assert rank["launches"] == [] and rank["ranks"] == 1
    assert all(list(finding) == ["level", "about", "what", "way_out"] for finding in report["findings"])
    assert rank["mpi_path"] in Path("/proc/self/maps").read_text() and "libmpi" in Path(rank["mpi_path"]).name
    assert main(["info"]) == code
    text = capsys.readouterr().out
    assert "no launcher: one rank" in text and rank["mpi"]["version"] in text


def test_one_of_several_lone_ranks_speaks(capsys: pytest.CaptureFixture[str], environ: Callable[..., None]) -> None:
    environ(**dict.fromkeys((*HYDRA, *SRUN)))
    environ(**PRTE)
    assert main(["info"]) == 1
    assert "mpirun of Open MPI started 4 ranks" in " ".join(capsys.readouterr().out.split())
    environ(OMPI_COMM_WORLD_RANK="1")
    assert main(["info"]) == 0
    assert capsys.readouterr().out == ""


def test_mpich_is_asked_by_its_own_call_whether_it_takes_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that it has in common with Open MPI ends a process of MPICH 3.4."""

    def query(kind: int, flag: Any) -> None:
        flag._obj.value = 1 if kind == 0 else 0

    of_mpich = SimpleNamespace(MPIX_GPU_query_support=query, MPIX_Query_cuda_support=lambda: pytest.fail("asked"))
    monkeypatch.setattr(capabilities.ctypes, "CDLL", lambda name: of_mpich)
    assert capabilities.claims_device_buffers()
    monkeypatch.setattr(capabilities.ctypes, "CDLL", lambda name: SimpleNamespace(MPIX_Query_cuda_support=lambda: 1))
    assert capabilities.claims_device_buffers()
