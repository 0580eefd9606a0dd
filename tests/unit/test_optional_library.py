"""Optional libraries for devices: when they are imported and started, and what is said where that fails."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import standin

from mpishard.backend.cublas import LIBRARY as CUBLASLT
from mpishard.backend.optional_library import OptionalLibrary
from mpishard.nn.device_attention import LIBRARY as CUDNN

NAME = "library_of_a_test"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OptionalLibrary[Any]:
    """One that is installed, and whose start gives a new list."""
    (tmp_path / f"{NAME}.py").write_text("started = []\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return OptionalLibrary("Lib", "lib-python", NAME, "MPISHARD_LIB", "it is slow", lambda module, like: [module])


@pytest.mark.parametrize("known", [CUBLASLT, CUDNN], ids=["cublaslt", "cudnn"])
def test_they_are_for_cupys_arrays_only_and_can_be_turned_off(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replace(known).module_for("standin") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(name=name))
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    assert replace(known).module_for("cupy") == known.module
    monkeypatch.setenv(known.variable, "0")
    assert replace(known).module_for("cupy") is None


def test_an_import_that_fails_is_warned_of_once(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.module_for("cupy") is sys.modules[NAME]
    (tmp_path / f"{NAME}.py").write_text("raise OSError('libthing.so: not found')\n", "utf-8")
    monkeypatch.delitem(sys.modules, NAME)
    broken = replace(library)
    with pytest.warns(RuntimeWarning) as caught:
        assert broken.module_for("cupy") is broken.module_for("cupy") is None
        broken.warn_once("something else")
    assert [str(each.message) for each in caught] == [
        "the package lib-python is installed, but cannot be imported (libthing.so: not found); it is slow; "
        "MPISHARD_LIB=0 turns Lib off without a warning"
    ]


def test_what_is_not_installed_is_not_warned_of(library: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace(library, module="no_such_package.inner").module_for("cupy") is None


def test_it_is_started_once_for_each_thread(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    like = standin.empty(1)
    assert library.on_device(like) is None  # these arrays are not CuPy's
    monkeypatch.setattr(library, "module_for", lambda name: name)
    found = [library.on_device(like), library.on_device(like)]
    other = threading.Thread(target=lambda: found.append(library.on_device(like)))
    other.start()
    other.join()
    assert found[0] is found[1] is not found[2]
    assert found[0] == found[2] == [standin.__name__]


def test_a_start_that_fails_is_tried_and_warned_of_once(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def start(module: Any, like: Any) -> Any:
        tried.append(module)
        raise RuntimeError("STATUS_NOT_INITIALIZED")

    failing = replace(library, start=start)
    monkeypatch.setattr(failing, "module_for", lambda name: name)
    with pytest.warns(RuntimeWarning, match="Lib does not start on this device .STATUS_NOT_INITIALIZED") as caught:
        assert [failing.on_device(standin.empty(1)) for _ in range(2)] == [None, None]
    assert len(tried) == len(caught) == 1
