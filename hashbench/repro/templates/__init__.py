"""Fills the templates of a repro: ``repro.py`` (one for each experiment that a script can repeat) and ``REPORT.md``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from tabulate import tabulate


def render(name: str, **values: Any) -> str:
    """The text of the template ``name`` with these values; raises where it names a value that is not among them."""
    return _environment().get_template(name).render(values)


def exists(name: str) -> bool:
    """Whether there is a template of this name."""
    return name in _environment().list_templates()


@functools.cache  # compiling the templates takes longer than filling them
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=False,  # it makes Python and Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"in_docstring": _in_docstring, "table": _table, "facts": _facts}
    return environment


def _in_docstring(text: str) -> str:
    """The text as it stands between three quotes in Python."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _table(rows: Iterable[Sequence[object]], *headers: str) -> str:
    """A table in Markdown."""
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, without those that have no value."""
    return _table([(name, value) for name, value in rows if value], "what", "")
