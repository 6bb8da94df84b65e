"""``hashbench.read_sweep``: the rows of a sweep as a :class:`pandas.DataFrame`.

>>> hashbench.read_sweep("results/full")[["suite", "name", "accuracy", "seconds"]]  # doctest: +SKIP
         suite      name               accuracy  seconds
0  torchvision   alexnet                   pass     12.3
1  torchvision  resnet18  eager_two_runs_differ     48.1
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.core.records import ExpectedRow, value_of
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import EXPECTED_ROWS, ROWS

if TYPE_CHECKING:
    import pandas

_DTYPES = {int: "Int64", float: "Float64"}


def read_sweep(path: Path | str) -> pandas.DataFrame:
    """Return one line per model of a sweep, with the columns of ``accuracy.csv`` (docs/csv.md) in their order.

    Whole numbers have the dtype ``Int64``, other numbers ``Float64`` and texts ``string``. An empty cell is
    ``pandas.NA``, never zero. The columns ``since``, ``seen`` and ``link`` are there only if a row has them.

    Args:
        path: a CSV, a results folder, or a folder of results folders (modes, shards, or one night).

    Raises:
        HashbenchError: there is no sweep at ``path``, a file is damaged or of another version, or a model has two
            results.
    """
    import pandas

    rows = load_sweep(path).rows
    types = (EXPECTED_ROWS if any(isinstance(row, ExpectedRow) for row in rows) else ROWS).types
    columns = {}
    for name, kind in types.items():
        values = [value_of(row, name) for row in rows]
        cells = values if kind in _DTYPES else [str(value or "") or None for value in values]
        columns[name] = pandas.Series(cells, dtype=_DTYPES.get(kind, "string"))
    return pandas.DataFrame(columns)
