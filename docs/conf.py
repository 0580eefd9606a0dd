"""Sphinx builds the site from this: ``tox -e docs``, or ``sphinx-build -n -W docs docs/_build/html``."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sphinx.util import logging  # noqa: E402

import mpishard  # noqa: E402

project = "mpishard"
author = "The mpishard developers"
copyright = "the mpishard developers, Apache-2.0"
version = release = mpishard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "sphinx_copybutton"]
extensions += ["pictures", "commands"]  # of this folder
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"mpishard {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search.js")
html_show_sphinx = False

# Types are in the docstrings, in words; signatures without them fit on a phone.
autodoc_typehints = "none"
autodoc_mock_imports = [name for name in ("jax", "torch") if importlib.util.find_spec(name) is None]
autodoc_member_order = "bysource"
# The source has no defaults of options that models take by name: `_short` writes the values instead.
autodoc_preserve_defaults = False
autosummary_generate = False
numpydoc_show_class_members = False
# What is in single backticks in a docstring is a link where that name is documented, and else only set apart.
default_role = "autolink"

# A public name that no page of the reference has is a mistake.
_ROOMS = "compression data environment estimate inverse jax minimizers minimizers.line_search nn optim pyadjoint"
DOCUMENTED = ("mpishard", *(f"mpishard.{room}" for room in (*_ROOMS.split(), "pipeline.schedule", "record", "torch")))


def _quiet(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Allow names without a link: parameters and methods in single backticks, and private or NumPy's in signatures."""
    if node.get("refdomain") != "py":
        return None
    return contnode if node.get("reftype") == "obj" or node["reftarget"].startswith(("mpishard.", "numpy.")) else None


def _check_all_documented(app: Any, env: Any) -> None:
    from importlib import import_module

    known = env.get_domain("py").objects
    for module in DOCUMENTED:
        for name in import_module(module).__all__:
            full = f"{module}.{name}"
            # Some have their page under the name that is imported from mpishard itself.
            if full not in DOCUMENTED and full not in known and f"mpishard.{name}" not in known:
                logging.getLogger(__name__).warning("the reference has no page with %s", full, location="reference")


def _short(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """Write classes and modules among the defaults of a signature by their names."""
    text = re.sub(r"<(?:class|module) '([\w.]+)'[^>]*>", r"\1", signature or "")
    return (text, returns) if text else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _short)
    app.connect("missing-reference", _quiet)
    app.connect("env-check-consistency", _check_all_documented)
