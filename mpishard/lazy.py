"""What is imported when it is first used: modules of packages by their names, and what an extra brings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_when_used(package: str, modules: Mapping[str, str], needs: str = "") -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package: it imports the module of a name, and keeps the name in the package.

    Every rank of a job reads what it imports from the same file system, and takes time to run it.  `modules` has the
    names in each module of the package, between spaces; the function raises AttributeError for any other name.  A
    package that `needs` a library, whose name it has, raises ModuleNotFoundError without that.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if needs:
            library = package.rpartition(".")[2]
            try:
                import_module(library)
            except ModuleNotFoundError as error:
                text = f"{package}.{name} needs {needs}: pip install 'mpishard[{library}]'"
                raise ModuleNotFoundError(text, name=error.name) from None
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def of_extra(module: str, extra: str, user: str) -> Any:
    """Import a module that an extra of mpishard brings; without it ModuleNotFoundError says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        text = f"{user} needs the package {package}: pip install 'mpishard[{extra}]'"
        raise ModuleNotFoundError(text, name=package) from None
