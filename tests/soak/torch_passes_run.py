"""mpirun -n 3 python tests/soak/torch_passes_run.py [--loops 1000] [--first 0] [--zero 0 1 2 3]

Take random loops of backward passes, ``no_sync``, drops, changes of gradients, clipping and steps under every `zero`,
beside the gradients of DistributedDataParallel (`tests/helpers/torch_passes.py`), and print the largest difference.
`tests/mpi/test_torch_loops.py` takes a few of them.  Run it where `mpishard/torch` or `mpishard/parameters` changes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import mpishard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import torch_passes

LARGEST = 1e-10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    failed = 0
    with mpishard.Mesh() as mesh, open(os.devnull, "w") as nothing:
        for zero in options.zero:
            differences = {}
            for seed in range(options.first, options.first + options.loops):
                with contextlib.redirect_stderr(nothing):
                    differences[seed] = torch_passes.largest_difference(mesh, seed, zero)
            wrong = [seed for seed, difference in differences.items() if not difference < LARGEST]
            failed += len(wrong)
            if mesh.rank == 0:
                text = f"zero={zero}: {len(differences)} loops on {mesh.size} ranks, {len(wrong)} differ {wrong[:5]}"
                print(f"{text}, largest difference {max(differences.values()):.1e}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
