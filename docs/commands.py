"""A directive that lists the commands of ``mpishard`` with their arguments and options, as ``--help`` shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from mpishard.cli.app import app as application

# What is shown as code in a help text: options, calls, files.
_CODE = re.compile(r"((?<![\w-])--?[a-z][a-z-]*(?: [\d.,]*\d)?|[\w.]+\([^()]*\)|\b[a-z]+\.(?:png|json|py)\b)")
# Click ends a listing that is not to be wrapped so.
_LISTING = "\b\n"


class Commands(SphinxDirective):
    """``{mpishard-commands}``: one section for each command that its lines name."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        group: Any = typer.main.get_command(application)
        context = group.context_class(group, info_name="mpishard")
        return [self._section(name, group.get_command(context, name), context) for name in self.content]

    def _section(self, name: str, command: Any, parent: Any) -> nodes.section:
        context = command.context_class(command, info_name=name, parent=parent)
        section = nodes.section(ids=[f"mpishard-{name}"], names=[f"mpishard {name}"])
        section += nodes.title("", f"mpishard {name}")
        section += nodes.literal_block(
            "", command.get_usage(context).removeprefix("Usage: ").replace("{", "").replace("}", ""), language="text"
        )
        for text in (command.help or "").split("\n\n"):
            if text.startswith(_LISTING):
                section += nodes.literal_block("", text.removeprefix(_LISTING), language="text")
            else:
                section += _paragraph(text)
        section += _definitions(each.get_help_record(context) for each in command.params if each.name != "help")
        self.state.document.note_explicit_target(section)
        return section


def _definitions(records: Iterable[tuple[str, str]]) -> nodes.definition_list:
    found = nodes.definition_list()
    for term, text in records:
        item = nodes.definition_list_item()
        item += nodes.term("", "", nodes.literal("", term))
        item += nodes.definition("", _paragraph(text))
        found += item
    return found


def _paragraph(text: str) -> nodes.paragraph:
    return nodes.paragraph("", "", *_inline(" ".join(text.split())))


def _inline(text: str) -> Iterator[nodes.Node]:
    for place, part in enumerate(_CODE.split(text)):
        if part:
            yield nodes.literal("", part) if place % 2 else nodes.Text(part)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("mpishard-commands", Commands)
    return {"parallel_read_safe": True}
