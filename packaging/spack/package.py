# A package of Spack 1.0 and later; packaging/fill.py fills the marks.

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import default_args, depends_on, license, run_after, variant, version, which


class PyMpishard(PythonPackage):
    """Minimisation and training sharded over MPI ranks, on flat NumPy and CuPy arrays"""

    homepage = "@HOME@"
    url = "@FOLDER@/mpishard-0.1.0.tar.gz"

    # Others import what is optional.
    import_modules = ["mpishard", "mpishard.nn", "mpishard.minimizers"]

    license("Apache-2.0")

    version("0.1.0", sha256="@SHA256@")

    variant("kernels", default=True, description="Compile the kernels for the processor at hand")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@2:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-h5py@3.11:")
        depends_on("py-xxhash@3.4:")
        depends_on("py-numba@0.60:")
        depends_on("py-threadpoolctl@3.5:")
        depends_on("py-tqdm@4.60:")
        # The extra `cli`: the commands, and pictures.
        depends_on("py-matplotlib@3.9:")
        depends_on("py-typer@0.15.4:")
        depends_on("py-rich@13:")

    # That of mpi4py, which an external may not name; its mpiexec starts the test.
    depends_on("mpi", type="run")
    depends_on("py-setuptools@77:", type="build")

    @run_after("install", when="+kernels")
    def compile_kernels(self):
        """Users cannot write to the prefix; on another processor a process compiles itself."""
        path = filter(None, [self.module.python_purelib, os.environ.get("PYTHONPATH")])
        # The script, since `python -m` would find the sources in the working directory first.
        mpishard = which(self.prefix.bin.mpishard, required=True)
        mpishard("compile", extra_env={"PYTHONPATH": os.pathsep.join(path)})

    def test_selftest(self):
        """two ranks communicate, compute and store what they should"""
        mpiexec = which(self.spec["mpi"].prefix.bin.mpiexec, required=True)
        mpiexec("-n", "2", self.prefix.bin.mpishard, "selftest")
