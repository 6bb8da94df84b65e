"""Rows by the names of all their columns, whoever fills them."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from hashbench.core.extensions import facts_kinds
from hashbench.core.records import Facts, Row, holding
from hashbench.core.results.rows import ROWS

_Row = TypeVar("_Row", bound=Row)


def changed(row: _Row, **columns: Any) -> _Row:
    """Return a row with other values in some columns, those of extensions among them."""
    facts = row.facts
    for kind in facts_kinds():
        own = {one.name: columns.pop(one.name) for one in fields(kind) if one.name in columns}
        facts = holding(facts, replace(row.of(kind), **own)) if own else facts
    kept = (one for kind in facts_kinds() for one in facts if type(one) is kind and one != kind())
    return replace(row, facts=tuple(kept), **columns)


def made(*values: Any, **columns: Any) -> Row:
    """Return a row of some columns; the first four in their order."""
    first = dict(zip(("dev", "name", "batch_size", "accuracy"), values, strict=False))
    required = {name: columns.pop(name, None) for name in ("dev", "name", "batch_size", "accuracy")} | first
    return changed(Row(**required), **columns)


def flat(row: Row) -> Any:
    """Return the values of all columns of a row, as attributes."""
    columns = ROWS.columns.items()
    return SimpleNamespace(
        **{name: getattr(row.of(holder) if issubclass(holder, Facts) else row, name) for name, (holder, *_) in columns}
    )
