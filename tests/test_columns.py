"""Which columns a CSV has: the core's, rare ones where a row has them, and an extension's where it was asked for."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import facts_asked, facts_kinds
from hashbench.core.records import BATCH_INVARIANCE, Row, RunOptions
from hashbench.core.results.folder import ResultsFolder
from hashbench.core.results.rows import ROWS, read_rows, read_table
from tests.core.report.rows import PLAIN, row
from tests.extensions.compiled.compiled_rows import INACCURATE
from tests.flat_rows import changed, flat

MOST = 45
OF_FACTS = {name: holder for name, (holder, *_) in ROWS.columns.items() if holder is not Row}


def header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def test_an_ordinary_sweep_has_few_columns_and_none_of_an_extension() -> None:
    columns = ROWS.written([], asked=facts_asked(RunOptions()))
    assert columns[:4] == ("dev", "name", "batch_size", "accuracy")
    assert len(columns) <= MOST
    assert OF_FACTS.keys().isdisjoint(columns)
    assert ROWS.written([PLAIN]) == columns


@pytest.mark.parametrize(
    ("asked", "column"),
    [
        ({"backend": "inductor"}, "stage"),
        ({"stress": True}, "stressed"),
        ({"mode": BATCH_INVARIANCE}, "batch_sizes"),
    ],
)
def test_an_extension_that_was_asked_for_has_all_its_columns(asked: dict[str, object], column: str) -> None:
    columns = ROWS.written([PLAIN], asked=facts_asked(RunOptions(**asked)))  # type: ignore[arg-type]
    ours = [name for name, holder in OF_FACTS.items() if holder is OF_FACTS[column]]
    assert list(columns[-len(ours) :]) == ours


def test_a_row_brings_its_columns_in_their_order() -> None:
    ranked = row("a", world_size=2)
    columns = ROWS.written([row("b", stressed="threads 0/1"), ranked, row("c", benign=0)])
    held = [name for name in ROWS.columns if name in columns]
    assert list(columns) == held
    assert {"benign", "world_size", "through", "stressed", "latent_rate"} <= {*columns}
    assert {"benign_ops", "stage", "batch_sizes"}.isdisjoint(columns)


def test_what_a_csv_lacks_reads_as_its_default(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.csv"
    path.write_text(ROWS.text([PLAIN]))
    (read,) = read_rows(path)
    assert read == PLAIN
    assert (read.max_ulp, flat(read).stage, flat(read).rank, read.facts) == (None, "", None, ())


def test_a_row_with_a_rarer_column_is_not_appended_to_a_file_without_it(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    first, later = row("a"), changed(INACCURATE, name="b", max_ulp=3)
    folder.rebuild_csv([first])
    before = folder.csv.read_bytes()
    assert not folder.append_to_csv(later)
    assert folder.csv.read_bytes() == before
    folder.rebuild_csv([first, later])
    assert {"max_ulp", "stage", "differing_results"} <= {*header(folder.csv)}
    assert folder.append_to_csv(changed(later, name="c", stage="lowering"))
    assert [flat(one).stage for one in read_rows(folder.csv)] == ["", "codegen", "lowering"]


def test_a_csv_of_all_columns_in_another_order_reads_the_same(tmp_path: Path) -> None:
    path, columns = tmp_path / "old.csv", sorted(ROWS.columns)
    path.write_text(",".join(columns) + "\n" + ROWS.line(INACCURATE, columns))
    (read,) = read_rows(path)
    assert flat(read).__dict__ | {"evidence": ""} == flat(INACCURATE).__dict__ | {"evidence": ""}


def test_columns_of_an_extension_whose_folder_is_gone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "accuracy.csv"
    path.write_text(ROWS.text([INACCURATE]))
    rows = replace(ROWS, facts=lambda: facts_kinds()[:2])
    monkeypatch.setattr("hashbench.core.results.rows.missing_extensions", lambda: ("compiled",))
    with pytest.raises(HashbenchError, match="does not know: graphs, graph_breaks") as refused:
        rows.rows(read_table(path))
    assert "Here hashbench has no folder of compiled." in refused.value.tip
