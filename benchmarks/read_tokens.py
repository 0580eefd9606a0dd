"""mpiexec -n 8 python benchmarks/read_tokens.py [--gigabytes 10] [--steps 200] [--seconds 0.05]

Reads a token file that is larger than what the ranks may hold, and says how much of it stays in memory and how often a
step had to wait for its micro-batch.  A step is a sleep of so many seconds: what the reader may use.  The file is
sparse: all of it is zeros but for what tells positions apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import mpishard
from mpishard.data import ReadAhead, TokenData, TokenFile
from mpishard.data.sampling import Sampler, share

CONTEXT = 1024
SAMPLES = 32  # of a rank in a step
STRIDE = 10_000_019  # tokens from one that is not zero to the next


def resident() -> dict[str, float]:
    """MiB of this process in memory: all, and what is of no file."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon", "RssFile")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a step")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    with mpishard.Mesh() as mesh:
        path = Path(options.folder, "read-tokens.bin")
        count = int(options.gigabytes * 1e9) // 2
        if mesh.rank == 0:
            with open(path, "wb") as file:
                file.truncate(2 * count)
                for position in range(0, count, STRIDE):
                    file.seek(2 * position)
                    file.write(np.uint16(1 + position % 50_000).tobytes())
        mesh.world.barrier()
        before, began = resident(), time.perf_counter()
        data = TokenData(TokenFile(path), CONTEXT, vocabulary_size=50_257, mesh=mesh)
        checked = time.perf_counter() - began
        batch_size = SAMPLES * mesh.size
        sampler = Sampler(len(data), batch_size)
        most, order = dict(before), []
        with ReadAhead(data.batch) as batch:
            for step in range(1, options.steps + 1):
                coming = [share(sampler.batch(each), mesh.rank, mesh.size)[0] for each in range(step, step + 3)]
                batch.expect(coming)
                if step == 1:
                    time.sleep(options.seconds)  # what a run does before its first step
                inputs, _ = batch(coming[0])
                order.append(int(coming[0].sum() + inputs.sum()))
                time.sleep(options.seconds)
                most = {name: max(value, most[name]) for name, value in resident().items()}
        figures = (
            checked,
            batch.waits,
            batch.seconds_waited,
            batch.most_bytes / 2**20,
            *before.values(),
            *most.values(),
        )
        worst = np.max(mesh.world.allgather_object(figures), axis=0)
        total = sum(mesh.world.allgather_object(sum(order)))
        if mesh.rank == 0:
            path.unlink()
            print(f"{mesh.size} ranks, {2 * count / 1e9:g} GB, {len(data):,} samples of {CONTEXT} tokens")
            print(f"all tokens compared with the vocabulary in {worst[0]:.1f} s, each rank its share")
            print(f"{options.steps} steps of {options.seconds * 1000:g} ms, {SAMPLES} samples a rank; worst rank:")
            print(f"micro-batches that were not ready: {worst[1]:.0f}, {worst[2] * 1000:.1f} ms in all")
            print(f"micro-batches that waited: at most {worst[3]:.1f} MiB")
            print("MiB resident before: {:.0f} (anonymous {:.0f}, of files {:.0f})".format(*worst[4:7]))
            print("MiB resident at most: {:.0f} (anonymous {:.0f}, of files {:.0f})".format(*worst[7:10]))
            print(f"sum over samples and tokens: {total}", flush=True)


if __name__ == "__main__":
    main()
