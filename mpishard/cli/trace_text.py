"""How the traced steps were spent, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mpishard.cli.estimate_text import new_table
from mpishard.record.time_split import TimeSplit, mean

_MOST_RANKS = 32


def split_table(splits: Sequence[TimeSplit]) -> Table:
    """Milliseconds of a step and their shares, of each rank, and of several ranks their mean."""
    table = new_table("rank", "ms/step", "products", "communication", "rest")
    for split in splits[:_MOST_RANKS]:
        table.add_row(str(split.rank), *_figures(split))
    if len(splits) > 1:
        table.add_row(f"mean of {len(splits)}", *_figures(mean(splits, -1)))
    return table


def _figures(split: TimeSplit) -> list[str]:
    parts = split.products, split.communication, split.rest
    return [f"{split.step * 1e3:.2f}", *(f"{part * 1e3:.2f} ({part / split.step:.0%})" for part in parts)]
