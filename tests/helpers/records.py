"""Files of the record of a run, without a run."""

from __future__ import annotations

import json


def write(folder, metrics=(), processes=(), starts=()):
    (folder / "processes").mkdir(parents=True)
    for path, lines in [
        (folder / "metrics.jsonl", metrics),
        (folder / "starts.jsonl", starts),
        *((folder / "processes" / f"host-{number}.jsonl", lines) for number, lines in enumerate(processes)),
    ]:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def process_line(rank, step, seconds, **more):
    line = {"rank": rank, "ranks": 2, "step": step, "seconds": seconds, "busy": seconds, "phases": {}, "axes": {}}
    return line | more
