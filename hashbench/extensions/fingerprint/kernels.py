"""Say which kernels of a model changed between two sweeps that recorded fingerprints (``--fingerprints``).

Reads the results folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import RowPair
from hashbench.core.records import Row
from hashbench.core.report.reasons import KernelSigns
from hashbench.core.results.rows import row_key
from hashbench.core.text import join_limited
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.changes import changes_between, changes_text, signs_between
from hashbench.extensions.fingerprint.document import Fingerprints


def kernel_remarks(pairs: Iterable[RowPair], *, base: Sequence[Path], new: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each model whose status or first divergent kernel changed.

    Args:
        pairs: the rows of a model in both sweeps.
        base: CSVs of the first sweep; fingerprints are beside them.
        new: those of the second.
    """
    sides = [list(dict.fromkeys(file.parent for file in files)) for files in (base, new)]
    if not all(any((folder / document.FOLDER).is_dir() for folder in folders) for folders in sides):
        return  # nobody asked for fingerprints
    for before, after in pairs:
        if before is not None and after is not None and _what(before) != _what(after):
            yield f"{after.name} ({after.mode}): {_clause(after, *sides)}."


def kernel_signs(
    pairs: Iterable[RowPair], *, base: Sequence[Path], new: Sequence[Path]
) -> dict[tuple[str, ...], KernelSigns]:
    """Return what the fingerprints of both sweeps say of the kernels of each model, by op; arguments as of
    :func:`kernel_remarks`.

    A fingerprint that is damaged says nothing; where only the first sweep has one, the command that verifies it is
    named.
    """
    sides = [list(dict.fromkeys(file.parent for file in files)) for files in (base, new)]
    found = {}
    for _, row in pairs:
        if row is None:
            continue
        try:
            before, after = (_recorded(row, folders) for folders in sides)
        except HashbenchError:
            continue
        if before is not None and after is not None:
            found[row_key(row)] = signs_between(before, after)
        elif before is not None and (path := _path_of(row, sides[0])) is not None:
            tell = shlex.join(["hashbench", "fingerprint", "verify", str(path)])
            found[row_key(row)] = KernelSigns(tell=tell)
    return found


def _what(row: Row) -> tuple[str, str, str]:
    return row.accuracy, row.origin, row.kernel


def _clause(row: Row, base: Sequence[Path], new: Sequence[Path]) -> str:
    try:
        before, after = _recorded(row, base), _recorded(row, new)
    except HashbenchError as error:
        return f"its kernel fingerprint cannot be used ({error.consequence})"
    if before is None or after is None:
        return f"it has no kernel fingerprint in {'BASE' if before is None else 'NEW'}"
    changes = changes_between(before.models[0], after.models[0])
    text = changes_text(changes, base=before.environment, new=after.environment)
    varies = sorted(signs_between(before, after).varies)
    return f"{text}; {join_limited(varies, 4)} gave the same when repeated, and does not now" if varies else text


def _recorded(row: Row, folders: Sequence[Path]) -> Fingerprints | None:
    """Return the fingerprint of a row's model; ``None`` if there is none.

    Raises:
        HashbenchError: the file is damaged, or belongs to another model.
    """
    key = row.suite, row.name, row.mode
    path = _path_of(row, folders)
    if path is None:
        return None
    recorded = document.read(path)
    if len(recorded.models) != 1 or recorded.models[0].key[:3] != key:
        raise HashbenchError(f"cannot use {path}", consequence="it is of another model")
    return recorded


def _path_of(row: Row, folders: Sequence[Path]) -> Path | None:
    paths = (document.path_in(folder, (row.suite, row.name, row.mode)) for folder in folders)
    return next((path for path in paths if path.exists()), None)
