"""The runner of scripts under `mpishard run`: runs one as Python itself would, and knows afterwards how it ended.

It is no worker of an elastic run; the name stays, as command lines have it.

``python worker.py SCRIPT ARGUMENTS...`` or ``python worker.py -m MODULE ARGUMENTS...``; SCRIPT may be a folder or an
archive with a ``__main__.py``.  `mpishard run` starts this file by its path.  It imports nothing of mpishard, since
that starts MPI in a rank, and a script may set variables or options of mpi4py before.
``python -m mpishard.launch.worker`` does the same, and starts MPI first.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import signal
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, ClassVar

_NAME = "mpishard.launch.worker"
# What the interpreter itself calls for -m.  runpy.run_module would restore __main__ while threads still run.
_run_as_main: Any = vars(runpy)["_run_module_as_main"]


class Script:
    """The script of this process, which this module runs.

    `this` is None in a process that this module has not started.  `code` is the script's exit code: None until it has
    ended, and after an exception other than SystemExit.
    """

    this: ClassVar[Script | None] = None
    code: int | None = None

    def run(self, arguments: list[str]) -> None:
        """Run ``SCRIPT ARGUMENTS...`` or ``-m MODULE ARGUMENTS...`` as the module ``__main__``.

        Raises what the script raises; the traceback that the interpreter then shows begins with the script's own
        frames.
        """
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={}, __file__=None, __cached__=None)
        sys.modules["__main__"] = main
        try:
            if arguments[0] == "-m":
                sys.argv[:] = ["-m", *arguments[2:]]
                _begin_path(os.getcwd())
                _run_as_main(arguments[1])
            else:
                _run_file(main, arguments)
        except SystemExit as error:
            status = error.code
            self.code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
            if self.code == signal.SIGUSR1 and "mpishard.comm.supervisor_reports" not in sys.modules:
                _note_code(self.code)
            raise
        except BaseException as error:
            _show_without_runner(error)
            raise
        self.code = 0


def _note_code(code: int) -> None:
    """Note an exit code for the supervisor, which from the launcher's alone would take it for a signal."""
    run, attempt = os.environ.get("MPISHARD_RUN"), os.environ.get("MPISHARD_ATTEMPT")
    if run and attempt:
        temporary = f"{run}/.given-up-{os.uname().nodename}-{os.getpid()}"
        with contextlib.suppress(OSError):
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f'{{"code": {code}}}')
            os.replace(temporary, f"{run}/given-up-{attempt}")


def _run_file(main: ModuleType, arguments: list[str]) -> None:
    sys.argv[:] = arguments
    path = os.path.join(os.getcwd(), arguments[0])
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _begin_path(path, always=True)
        _run_as_main("__main__", alter_argv=False)
        return
    _begin_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__loader__ = loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(loader.source_to_code(source, path), main.__dict__)


def _begin_path(folder: str, always: bool = False) -> None:
    """Set the first entry of ``sys.path``, which is the folder of this file; with -I or -P there is no such entry.

    `always`: then there is one all the same.
    """
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _show_without_runner(error: BaseException) -> None:
    """Let the excepthook, which the interpreter calls next, get a traceback that begins in the script."""
    hook, trace = sys.excepthook, error.__traceback__
    while trace is not None and _is_not_the_scripts(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next

    def show(kind: type[BaseException], value: BaseException, whole: TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def _is_not_the_scripts(file: str) -> bool:
    return file in (__file__, runpy.__file__) or file.startswith("<frozen ")


def main() -> None:
    """Run the script that the arguments of this process name, with the arguments that follow it."""
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit("usage: worker.py SCRIPT ARGUMENTS..., or worker.py -m MODULE ARGUMENTS...")
    # The module by its own name, whatever it was started as: mpishard finds here how the script has ended.
    sys.modules[_NAME] = sys.modules["__main__"]
    Script.this = Script()
    Script.this.run(sys.argv[1:])


if __name__ == "__main__":
    main()
