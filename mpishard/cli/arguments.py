"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecordFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's record, as given to RunRecord.")]
