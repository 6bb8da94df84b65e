"""``accuracy.csv``: rows written and read back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hashbench.catalog import STATUSES
from hashbench.io import replace_file, to_json
from hashbench.records import ROW_KEY, Row
from hashbench.results.environments import check_schema
from hashbench.results.table import RowFormat, read_table

EXPECTED_COLUMNS = ("since", "link", "seen")
"""What a CSV of expected rows has beside those of :class:`Row`: a date, an address, a date."""


def _label(key: Sequence[str]) -> str:
    *where, name = key
    scope = ", ".join(filter(None, where))
    return f"{name} ({scope})" if scope else name


ROWS = RowFormat(
    Row,
    what="accuracies",
    example="the accuracy.csv of a sweep",
    key=ROW_KEY,
    label=_label,
    required=("dev", "name", "batch_size", "accuracy"),  # dynamo's columns: no file without them is one of accuracies
    filled=("dev", "name", "accuracy"),  # a model that never loaded has no batch size
    words={"accuracy": ("status", tuple(STATUSES))},
    extra=EXPECTED_COLUMNS,
)
"""How a :class:`Row` is written and read."""

row_key = ROWS.key_of
"""What identifies a row in a sweep, in the order of :data:`~hashbench.records.ROW_KEY`."""

row_to_json, row_from_json = to_json, ROWS.from_json


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace ``path`` by a CSV of ``rows``: a temporary file beside it, synced to disk, then renamed, so that a
    crash leaves the old file or the new one.

    Raises:
        HashbenchError: two rows have the same key (:data:`~hashbench.records.ROW_KEY`); nothing is written.
        OSError: the folder cannot be written or the disk is full; ``path`` is as it was.
    """
    kept = tuple(rows)
    ROWS.refuse_duplicates(str(path), kept)
    replace_file(path, ROWS.text(kept))


def read_rows(path: Path) -> list[Row]:
    """The rows of an ``accuracy.csv`` in file order, equal to the rows that were written.

    Columns of :class:`Row` that the file lacks read as absent, except the required ones.

    Raises:
        HashbenchError: the file is not a CSV, is damaged or cut off, lacks a required column, has columns that this
            version does not know, a status that is none, a number that is none, or two rows of the same key; or the
            ``environment.json`` beside it is of a schema that this version does not read.
    """
    check_schema(path)
    return ROWS.rows(read_table(path))
