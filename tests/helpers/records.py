"""Files of the record of a run, without a run."""

from __future__ import annotations

import json


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write(folder, metrics=(), processes=(), starts=()):
    (folder / "processes").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", *metrics)
    write_lines(folder / "starts.jsonl", *starts)
    for number, lines in enumerate(processes):
        write_lines(folder / "processes" / f"host-{number}.jsonl", *lines)
    return folder


def process_line(rank, step, seconds, **more):
    line = {"rank": rank, "ranks": 2, "step": step, "seconds": seconds, "busy": seconds, "phases": {}, "axes": {}}
    return line | more
