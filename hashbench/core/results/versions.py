"""Which hashbench wrote a file, and the refusal of what this one does not know.

A file names the hashbench that wrote it and the schema of its content. A field that a file lacks has its default, so
that a new field changes no schema. A field or word that this hashbench does not know, or another schema, is refused
with both versions named: guessing what it means, or dropping it, would lose results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hashbench import __version__
from hashbench.core.errors import HashbenchError
from hashbench.core.io import UnknownContentError
from hashbench.core.text import one_line

USE_THE_WRITER = "Use the hashbench that wrote it, or choose another --output."

SOMEBODY_ELSE = f"another version than hashbench {__version__}, or another tool,"


def stamp(schema: int) -> dict[str, Any]:
    """Return the fields by which a file names its schema and this hashbench."""
    return {"schema": schema, "hashbench": __version__}


def split(content: Mapping[str, Any], *, reads: int) -> dict[str, Any]:
    """Return ``content`` without the fields of :func:`stamp`, which it may lack.

    Raises:
        UnknownContentError: it is of another schema than the one that this hashbench ``reads``.
        ValueError: its schema is no number.
    """
    schema = content.get("schema", reads)
    if type(schema) is not int:
        raise ValueError(f"its schema is {schema!r:.40}")
    if schema != reads:
        raise UnknownContentError(f"it is of schema {schema}; {both(content, reads=reads)}")
    return {name: value for name, value in content.items() if name not in ("schema", "hashbench")}


def both(content: Mapping[str, Any], *, reads: int) -> str:
    """Name the version that wrote ``content``, a stamped document or an environment, and this one, with their
    schemas."""
    packages = content.get("packages")
    of_packages = packages.get("hashbench") if isinstance(packages, Mapping) else None
    writer = one_line(str(content.get("hashbench") or of_packages or "of an unknown version"))[:40]
    schema = one_line(str(content.get("schema", reads)))[:40]
    return f"hashbench {writer} wrote it (schema {schema}), this is hashbench {__version__} (schema {reads})"


def refuse_other_schema(
    path: object, content: Mapping[str, Any], *, reads: int, consequence: str, tip: str = USE_THE_WRITER
) -> None:
    """Raise :class:`HashbenchError` where ``content`` of ``path`` is of another schema than the one that this hashbench
    ``reads``; without a word about it, it has that one."""
    schema = content.get("schema", reads)
    if type(schema) is not int or schema != reads:
        raise HashbenchError(
            f"{path} has schema {one_line(repr(schema))[:40]} and this hashbench reads schema {reads}",
            consequence=f"{consequence}; {both(content, reads=reads)}",
            tip=tip,
        )
