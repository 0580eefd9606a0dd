"""``mpishard script``: the batch scripts of ``slurm/``, filled in, each as one file; and where that folder is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import shown
from mpishard.version import VERSION

_FILES = {"slurm": "train.sbatch", "array": "array.sbatch", "elastic": "elastic.sbatch"}
_DIRECTIVE = "#SBATCH --"
_BEGINS = "set -euo pipefail\n"  # after the head of each script
# Where the others go on as train.sbatch, and what a script trains if sbatch is given no arguments.
_REST = re.compile(r"^# The rest is that of train\.sbatch.*", re.MULTILINE | re.DOTALL)
_DEFAULT = re.compile(r"^(\[ \$# -gt 0 \] \|\| set -- )(.*\n)", re.MULTILINE)

_MAIL = "BEGIN END FAIL REQUEUE ALL NONE INVALID_DEPEND STAGE_OUT TIME_LIMIT ARRAY_TASKS".split()
_MAIL += [f"TIME_LIMIT_{percent}" for percent in (90, 80, 50)]
_MAILS = f"({'|'.join(_MAIL)})"
_TASKS = "[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?"
# What Slurm takes of options that are no numbers, and how that is told; upper and lower case are the same.
_FORMS = {
    "time": (
        "([0-9]+-)?[0-9]+(:[0-9]+){0,2}|-1|UNLIMITED|INFINITE",
        "30 (minutes), 12:00:00, 1-00:00:00 (days before the dash), or UNLIMITED",
    ),
    "mail-type": (f"{_MAILS}(,{_MAILS})*", f"words such as END,FAIL: {', '.join(_MAIL)}"),
    "array": (f"{_TASKS}(,{_TASKS})*(%[1-9][0-9]*)?", "0-3, 1,4,8, 0-15:4, or 0-15%2 for two tasks at a time"),
}


def script(
    kind: Annotated[str, typer.Argument(metavar="slurm|array|elastic", help="One run, a sweep, or an elastic run.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the training script and its options, or give them to sbatch."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: as many as the tasks need.")] = None,
    ntasks: Annotated[int | None, typer.Option(min=1, help="Ranks, with spares; of a sweep, of each run.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of a rank; default: 1.")] = None,
    time: Annotated[str, typer.Option(help="Time limit, such as 1-12:00:00; default: 04:00:00.")] = "",
    account: Annotated[str, typer.Option(help="Who pays.")] = "",
    partition: Annotated[str, typer.Option(help="Where it runs.")] = "",
    mail_type: Annotated[str, typer.Option(help="When Slurm writes a mail, such as END,FAIL.")] = "",
    array: Annotated[str, typer.Option(help="Of a sweep: its tasks; default: 0-3.")] = "",
) -> None:
    """Print a batch script for Slurm.

    \b
    mpishard script slurm --ntasks 8 -- train.py --lr 1e-3 > train.sbatch
    sbatch train.sbatch

    The job trains, leaves with a checkpoint when Slurm wants the nodes back, and queues itself again to go on.  A sweep
    has a run for each learning rate in RATES.  An elastic run survives the death of a rank; SPARES of its tasks wait.

    Options that are left out are those in the script.  Options and arguments of sbatch win over both.
    """
    if kind not in _FILES:
        raise ValueError(f"script is {shown(kind)}; choose one of {', '.join(_FILES)}")
    if array and kind != "array":
        raise ValueError(f"--array {array} is for a sweep: mpishard script array")
    given = {
        "nodes": nodes,
        "ntasks": ntasks,
        "cpus-per-task": cpus_per_task,
        "time": time,
        "account": account,
        "partition": partition,
        "mail-type": mail_type,
        "array": array,
    }
    directives = {name: str(value) for name, value in given.items() if value}
    for name, value in directives.items():
        if not value.isprintable() or re.search(r"[\s#'\"\\]", value):
            raise ValueError(f"--{name} is {shown(value)}; it must be one word without quotes or #")
        pattern, forms = _FORMS.get(name, (".*", ""))
        if not re.fullmatch(pattern, value, re.IGNORECASE):
            raise ValueError(f"--{name} is {shown(value)}; Slurm takes {forms}")
    if any(int(first) > int(last) for first, last in re.findall("([0-9]+)-([0-9]+)", array)):
        raise ValueError(f"--array is {array}; the first task of a range must not be after its last")
    typer.echo(_filled(kind, directives, command or []), nl=False)


def _filled(kind: str, directives: dict[str, str], command: list[str]) -> str:
    """The text of a batch script with these options of sbatch and this training script."""
    folder, file = folder_of("slurm"), _FILES[kind]
    text = (folder / file).read_text("utf-8")
    if kind != "slurm":
        # Slurm takes a copy of one file.
        rest = (folder / _FILES["slurm"]).read_text("utf-8").partition(_BEGINS)[2]
        text = _REST.sub(lambda _: "\n" + _DEFAULT.sub("", rest).lstrip("\n"), text)
    text = text.replace(f"slurm/{_FILES['slurm']}", file).replace(f"slurm/{file}", file)
    lines = text.splitlines()
    for name, value in directives.items():
        line = f"{_DIRECTIVE}{name}={value}"
        places = [at for at, each in enumerate(lines) if each.startswith(_DIRECTIVE)]
        same = [at for at in places if lines[at].startswith(f"{_DIRECTIVE}{name}=")]
        if same:
            lines[same[0]] = line
        else:
            lines.insert(places[-1] + 1, line)
    tasks = next(int(each.rpartition("=")[2]) for each in lines if each.startswith(f"{_DIRECTIVE}ntasks="))
    if int(directives.get("nodes", 1)) > tasks:
        raise ValueError(f"{directives['nodes']} nodes for {tasks} tasks; give --ntasks, the number of ranks")
    after = max(at for at, each in enumerate(lines) if each.startswith(_DIRECTIVE)) + 1
    lines.insert(after, f"# Printed by mpishard script {kind} of mpishard {VERSION}.")
    text = "\n".join(lines) + "\n"
    words = command[1:] if command and command[0] in ("python", "python3") else command
    if command and (not words or words[0].startswith("-")):
        raise ValueError(f"the command is {shlex.join(command)!r}; it must begin with a training script")
    return _DEFAULT.sub(lambda found: f"{found[1]}{shlex.join(words)}\n", text) if words else text


def folder_of(name: str) -> Path:
    """``slurm`` or ``examples``: a folder in the installed package, and beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).is_dir() else package.parent / name
