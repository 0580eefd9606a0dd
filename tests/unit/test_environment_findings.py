"""What is found in made-up facts of the environment, but for those of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts import GOOD, HYDRA, MPICH, OPEN_MPI, PRTE, SRUN, VERSIONS, changed, job, only

from mpishard.cli.info import show
from mpishard.comm.capabilities import Capabilities
from mpishard.environment import findings, launch_of, launches
from mpishard.launch.detection import foreign_launch
from mpishard.launch.launchers import Launcher


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings([GOOD]) == []
    assert findings(job(4, 4, launches=launches({**PRTE, "OMPI_COMM_WORLD_SIZE": "8"}))) == []


@pytest.mark.parametrize(
    ("environment", "launcher", "ranks"),
    [
        ({}, None, 0),
        (HYDRA, "mpirun of MPICH", 4),
        (PRTE, "mpirun of Open MPI", 4),
        (SRUN, "srun", 4),
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


def test_of_two_launchers_the_one_that_made_the_world_counts() -> None:
    both = launches({**PRTE, **HYDRA, "PMI_SIZE": "1"})
    assert [launch.ranks for launch in both] == [4, 1]
    assert findings([changed(GOOD, launches=both)]) == []


@pytest.mark.parametrize(
    ("environment", "library", "is_foreign"),
    [
        (HYDRA, "Open MPI", True),
        (PRTE, "MPICH", True),
        (HYDRA, "MPICH", False),
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
        (OPEN_MPI, None, HYDRA, "use the mpirun of the Open MPI that mpi4py was built with"),
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


def test_threads() -> None:
    poor = changed(GOOD, mpi=replace(OPEN_MPI, threads=False), thread_level="MPI_THREAD_FUNNELED")
    finding = only([poor])
    assert finding.level == "warning"
    assert "MPI_THREAD_FUNNELED" in finding.what and "no time limit" in finding.what


def test_more_ranks_than_cores() -> None:
    finding = only(job(4, 6, 9))
    assert finding.level == "warning"
    assert finding.what.startswith("9 ranks share 4 cores of n3 (and 1 more host like it)")
    # Each rank is bound to a core of its own.
    assert findings([changed(each, cores=(each.process.rank,)) for each in job(4)]) == []


def test_a_quota_of_cpu_time_counts_as_so_many_cores(capsys: pytest.CaptureFixture[str]) -> None:
    facts = job(4, cpu_quota=2.5)
    assert only(facts).what.startswith("4 ranks share 2 cores of n1 (by a quota of CPU time)")
    show(facts, findings(facts))
    assert "ranks 0 to 3 on 2 cores (by a quota of CPU time)" in capsys.readouterr().out
    assert findings(job(4, cpu_quota=4.0)) == []
    assert only(job(1, cpu_quota=0.5, blas_chosen="OMP_NUM_THREADS")).about == "blas"


def test_more_blas_threads_than_cores() -> None:
    assert findings(job(4)) == []  # a mesh will limit them
    finding = only(job(4, blas_chosen="OMP_NUM_THREADS"))
    assert finding.level == "warning"
    assert finding.what == "OMP_NUM_THREADS gives 4 ranks of n1 16 BLAS threads on 4 cores"
    assert findings(job(4, blas_chosen="OMP_NUM_THREADS", blas=(replace(GOOD.processor.blas[0], threads=1),))) == []
    assert findings(job(1, blas_chosen="OMP_NUM_THREADS")) == []
    one_each = job(8, blas_chosen="OMP_NUM_THREADS", blas=(replace(GOOD.processor.blas[0], threads=1),))
    assert only(one_each).about == "cores"


def test_libraries_for_products_that_ranks_chose_otherwise() -> None:
    ranks = job(3, products_chosen="mkl", versions={**VERSIONS, "mkl": "2026.2"})
    assert findings(ranks) == []
    finding = only([*ranks[:2], changed(ranks[2], products_chosen="")])
    assert (finding.level, finding.about) == ("wrong", "products")
    assert finding.what == "MPISHARD_PRODUCTS is mkl on rank 0 and unset on rank 2"


def test_libraries_for_products_that_cannot_be_had() -> None:
    finding = only(job(3, products_chosen="fast"))
    assert finding.level == "wrong" and "there is no library 'fast'" in str(finding)
    ranks = job(1, 1, products_chosen="mkl", versions={**VERSIONS, "mkl": "2026.2"})
    wrong = findings([ranks[0], changed(ranks[1], versions=VERSIONS)])
    assert "MPISHARD_PRODUCTS=mkl wants mkl, which n2 lacks" in [finding.what for finding in wrong]


def test_h5py() -> None:
    assert only([changed(GOOD, h5py_lacks=("virtual data sets",))]).level == "wrong"
    finding = only([changed(GOOD, h5py_lacks=("gzip", "lzf"))])
    assert finding.level == "warning" and "no gzip and no lzf" in finding.what


def test_shared_memory() -> None:
    assert [finding.level for finding in findings(job(4, shared_memory_free=2**30))] == []
    assert only(job(4, shared_memory_free=40 * 2**20)).level == "warning"
    finding = only(job(4, shared_memory_free=12 * 2**20))
    assert finding.level == "wrong"
    assert "has 12 MiB left, and MPI may take 64 MiB there for 4 ranks" in finding.what
    assert findings(job(4, shared_memory=None, shared_memory_free=None)) == []


def test_deaths() -> None:
    finding = only([changed(GOOD, heals=False)])
    assert finding.level == "note" and "--with-ft ulfm --mca coll ^han" in finding.way_out
    finding = only([changed(GOOD, heals=False, could_heal=False, mpi=MPICH, mpirun=None)])
    assert finding.level == "note" and "mpishard run --elastic" in finding.way_out
    finding = only([changed(GOOD, without_han=False)])
    assert finding.level == "warning" and "^han" in finding.way_out


def test_what_is_wrong_comes_first() -> None:
    poor = {"heals": False, "blas_chosen": "OMP_NUM_THREADS", "h5py_lacks": ("virtual data sets",)}
    assert [finding.level for finding in findings(job(2, **poor))] == ["wrong", "warning", "note"]
