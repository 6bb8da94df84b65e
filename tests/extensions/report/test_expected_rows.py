"""CSVs of expected rows: brought up to date with a sweep, written, read back."""

from __future__ import annotations

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ROW_SCHEMA, ExpectedRow, Row, extended
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import EXPECTED_ROWS
from hashbench.extensions.report.expected_rows import expect, expect_from, write_expected
from tests.core.report.rows import differing, expecting, row, sweep, write_night, write_sweep

LINK = "https://example.org/issues/7"


TODAY, EARLIER = "2026-11-20", "2026-10-01"


TOLD = {"since": EARLIER, "link": "https://example.org/old", "seen": EARLIER}


def update(new, before=None, **arguments):
    """What becomes of the one row of each: accuracy, since, link, seen, and what is said of it."""
    found = expect(new, known=before, today=TODAY, **arguments)
    return [(one.accuracy, one.since, one.link, one.seen) for one in found.rows], dict(found.what)


def test_everything_is_new_at_first():
    rows, what = update(sweep(differing(), row("vgg11")), link=LINK)
    assert rows == [("eager_two_runs_differ", TODAY, LINK, TODAY), ("pass", TODAY, "", "")]
    assert what == {"new": 2}


UPDATES = {
    "shows what was expected": (
        differing(),
        differing(),
        ("eager_two_runs_differ", EARLIER, TOLD["link"], TODAY),
        "unchanged",
    ),
    "passes as before": (row(), row(), ("pass", EARLIER, TOLD["link"], ""), "unchanged"),
    "moved": (differing(), differing(kernel="aten.dot"), ("eager_two_runs_differ", TODAY, LINK, TODAY), "changed"),
    "is fixed": (differing(), row(), ("pass", TODAY, "", ""), "changed"),
    "is broken": (row(), row(accuracy="crashed"), ("crashed", TODAY, LINK, TODAY), "changed"),
    "ran otherwise": (row(threads=1), row(threads=2), ("pass", TODAY, "", ""), "changed"),
    "differs now and then and did not": (
        differing(rate=0.2),
        row(),
        ("eager_two_runs_differ", EARLIER, TOLD["link"], EARLIER),
        "kept: not seen",
    ),
}


@pytest.mark.parametrize(("before", "now", "told", "word"), UPDATES.values(), ids=UPDATES.keys())
def test_a_row_that(before, now, told, word):
    assert update(sweep(now), expecting(before, told=TOLD), link=LINK) == ([told], {word: 1})


def test_named_model_is_taken_though_not_seen():
    rows, _ = update(sweep(row(), row("vgg11")), expecting(differing(rate=0.2), told=TOLD), only=["resnet18"])
    assert rows == [("pass", TODAY, "", "")]


def test_models_not_named_are_left_and_listed():
    new, known = sweep(row("a"), row("b"), row("c")), expecting(row("b"), row("gone"), told=TOLD)
    made = expect(new, known=known, only=["a"], today=TODAY)
    assert made.what == {"kept: not named": 1, "kept: not in the sweep": 1, "new": 1}
    assert (made.taken, made.left) == (("a",), ("b", "c"))


@pytest.mark.parametrize(
    ("only", "tip"),
    [(["resnet81"], "Did you mean resnet18?"), (["resnet18", "x"], "no row of x: .* It has rows of: resnet18, vgg11.")],
    ids=["a name that is nearly there", "one name of two"],
)
def test_a_name_that_the_sweep_lacks_is_refused(tmp_path, only, tip):
    night = write_night(tmp_path, "2026-11-20", row("resnet18"), row("vgg11"))
    with pytest.raises(HashbenchError, match=tip):
        expect_from([night], output=tmp_path / "x.csv", today=TODAY, only=only)
    assert not (tmp_path / "x.csv").exists()


def test_rows_not_in_the_sweep_are_kept():
    rows, what = update(sweep(row()), expecting(row("gone"), row(dev="cuda"), told=TOLD))
    assert [one[:2] for one in rows] == [("pass", EARLIER), ("pass", EARLIER), ("pass", TODAY)]
    assert what == {"kept: not in the sweep": 2, "new": 1}


def test_what_it_refuses():
    for arguments, message in (
        ({"link": "javascript:alert(1)"}, "is not an address"),
        ({"link": "https://example.org/<b>"}, "is not an address"),
    ):
        with pytest.raises(HashbenchError, match=message):
            update(sweep(row()), **arguments)
    with pytest.raises(HashbenchError, match="holds no rows"):
        update(sweep())
    with pytest.raises(HashbenchError, match="dynamo"):
        update(sweep(row(), kind="dynamo"))


def test_written_rows_are_read_back(tmp_path):
    path = tmp_path / "expected" / "x.csv"
    odd = differing("=1+1", repro="repro/x", traces="traces/x", env="e1")
    made = expect(
        sweep(odd, row("vgg11"), environments={"e1": {"key": "e1", "schema": 2}, "e0": {"key": "e0"}}),
        known=None,
        link=LINK,
        today=TODAY,
    )
    write_expected(path, made)
    found = load_sweep(path)
    assert found.rows == made.rows
    assert (found.rows[0].repro, found.rows[0].traces) == ("", "")
    assert [(one.since, one.link, one.seen) for one in found.rows] == [(TODAY, LINK, TODAY), (TODAY, "", "")]
    assert dict(found.environments) == {"e1": {"key": "e1", "schema": ROW_SCHEMA}}


@pytest.mark.parametrize(
    ("column", "text"), [("since", "yesterday"), ("seen", "20261120"), ("link", "javascript:alert(1)"), ("link", "x y")]
)
def test_invalid_date_or_link_is_refused_with_its_line(tmp_path, column, text):
    (tmp_path / "x.csv").write_text(EXPECTED_ROWS.text([extended(ExpectedRow, row(), **{column: text})]))
    with pytest.raises(HashbenchError, match=rf"line 2 of .*x\.csv has .* as {column}"):
        load_sweep(tmp_path / "x.csv")


def test_folder_gets_a_csv_by_suite_mode_and_device(tmp_path):
    night = write_night(tmp_path / "nights", "2026-11-20", row("a"), row("a", mode="inference"), row("b", suite="timm"))
    output = tmp_path / "expected"
    found = expect_from([night], output=output, today=TODAY)
    assert sorted(path.name for path, _ in found) == sorted(path.name for path in output.glob("*.csv"))
    assert sorted(path.name for path in output.glob("*.csv")) == [
        "timm_training_cpu.csv",
        "torchvision_inference_cpu.csv",
        "torchvision_training_cpu.csv",
    ]
    again = expect_from([night], output=output, today=TODAY, only=["b"])
    assert [(path.name, dict(made.what)) for path, made in again] == [("timm_training_cpu.csv", {"unchanged": 1})]
    with pytest.raises(HashbenchError, match="has no row of vgg11"):
        expect_from([night], output=output, today=TODAY, only=["vgg11"])


def test_unreadable_file_leaves_all_unwritten(tmp_path):
    night = write_night(tmp_path / "nights", "2026-11-20", row("a"), row("b", suite="timm"))
    output = tmp_path / "expected"
    output.mkdir()
    (output / "torchvision_training_cpu.csv").write_text("not,a,csv\n")
    with pytest.raises(HashbenchError, match="torchvision_training_cpu"):
        expect_from([night], output=output, today=TODAY)
    assert [path.name for path in output.iterdir()] == ["torchvision_training_cpu.csv"]


def test_compare_reads_the_columns_of_an_expected_csv(tmp_path):
    write_expected(tmp_path / "x.csv", expect(sweep(differing()), known=None, today=TODAY))
    write_sweep(tmp_path / "new", differing())
    (expected,), (new,) = (load_sweep(tmp_path / name).rows for name in ("x.csv", "new"))
    assert extended(Row, expected) == new


ACCEPTED = {
    "broken": (row(), row(accuracy="crashed", error="killed by\nSIGSEGV"), "pass -> crashed (killed by SIGSEGV)"),
    "fixed": (differing(), row(), "eager_two_runs_differ -> pass"),
    "moved": (
        differing(),
        differing(kernel="aten.dot"),
        "eager_two_runs_differ -> eager_two_runs_differ (kernel: aten.dot in layer1.0)",
    ),
    "new and different": (
        None,
        differing(),
        "new -> eager_two_runs_differ (kernel: aten.index_put_.default in layer1.0)",
    ),
    "new and fine": (None, row(), ""),
    "as before": (differing(), differing(), ""),
    "not seen": (differing(rate=0.2), row(), ""),
}


@pytest.mark.parametrize(("before", "now", "said"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_it_says_what_is_expected_now(before, now, said):
    made = expect(sweep(now), known=expecting(before) if before else None, today=TODAY)
    assert made.accepted == ((f"resnet18: {said} is expected now",) if said else ())


def test_rows_that_pass_get_no_link():
    rows, _ = update(sweep(row(), row("b")), expecting(row(), row("b"), told={**TOLD, "link": ""}), link=LINK)
    assert [one[2] for one in rows] == ["", ""]


def test_a_compiled_row_never_replaces_an_eager_one():
    eager, compiled = sweep(row()), sweep(row(backend="inductor"))
    for before, now, words in ((eager, compiled, "of eager mode, and"), (compiled, eager, "of inductor, and")):
        with pytest.raises(HashbenchError, match=words):
            update(now, before)
    assert update(compiled, compiled)[1] == {"unchanged": 1}
