"""The counts of stressed pairs in a CSV, forged ones among them."""

from __future__ import annotations

import pytest

from hashbench import cli
from hashbench.core.results.rows import row_from_json, row_to_json
from hashbench.extensions.stress.facts import StressFacts
from tests.core.report.rows import row, write_rows

FORGED = {
    "more than there were": "threads 5/1",
    "none of none": "threads 0/0",
    "a perturbation that is none": "weather 0/3",
    "twice the same": "threads 0/3; threads 0/3",
    "no count": "threads often",
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_counts_of_stressed_pairs_that_cannot_be_are_refused_in_one_line(tmp_path, capsys, forged):
    write_rows(tmp_path / "base.csv", [row(accuracy="pass", stressed="threads 0/3")])
    write_rows(tmp_path / "new.csv", [row(accuracy="pass", stressed=forged)])
    assert cli.main(["compare", str(tmp_path / "base.csv"), str(tmp_path / "new.csv")]) == 2
    assert capsys.readouterr().err == (
        f"hashbench: line 2 of {tmp_path / 'new.csv'} has {forged!r} as stressed: that is not how many pairs differ of "
        "how many there were. Such a cell reads: threads 0/5; load 0/6.\n"
    )
    with pytest.raises(ValueError, match="not a row: stressed is"):
        row_from_json(row_to_json(row(accuracy="pass", stressed=forged)))


def test_counts_in_a_reason_are_none_of_pairs():
    told = row(accuracy="pass", stressed="load 0/6; process not run (step 9/1 failed)")
    assert told.of(StressFacts).counts == {"load": (0, 6)}
