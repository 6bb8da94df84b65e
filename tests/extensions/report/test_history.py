"""Many nights become one history; what cannot be read is named, and never read as a pass."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.results.load import load_file
from hashbench.core.results.rows import ROWS, row_key
from hashbench.extensions.report.history import History, Interval, find_nights, load_history, models_in_trouble, seen
from tests.core.report.rows import differing, row, write_night, write_sweep
from tests.extensions.compiled.compiled_rows import INACCURATE
from tests.extensions.report.histories import DIAGNOSED, diagnosed, failed, history, passing
from tests.flat_rows import changed

KEY = ("torchvision", "training", "float32", "cpu", "resnet18")


def intervals_of(history: History, name: str = "resnet18") -> list[tuple[int, int, str]]:
    (model,) = (model for model in history.models if model.key[-1] == name)
    return [(interval.first, interval.last, interval.accuracy) for interval in model.intervals]


# ------------------------------------------------------------------------------------------------------ intervals


def test_nights_become_intervals(tmp_path):
    for day, accuracy in enumerate(["pass", "pass", "crashed", "pass", "pass"], start=1):
        write_night(tmp_path, f"2026-11-{day:02d}", row("resnet18", accuracy), row("vgg11"))
    history = load_history([tmp_path])
    assert [night.label[-2:] for night in history.nights] == ["01", "02", "03", "04", "05"]
    assert intervals_of(history) == [(0, 1, "pass"), (2, 2, "crashed"), (3, 4, "pass")]
    assert intervals_of(history, "vgg11") == [(0, 4, "pass")]


def test_another_kernel_or_cause_begins_another_interval(tmp_path):
    for day, values in enumerate([{}, {"kernel": "aten.dot.default"}, {"cause": "rng"}, {}], start=1):
        write_night(tmp_path, f"2026-11-0{day}", differing(**values))
    (model,) = load_history([tmp_path]).models
    assert [(interval.kernel, interval.cause) for interval in model.intervals] == [
        ("aten.index_put_.default", "write_race"),
        ("aten.dot.default", "write_race"),
        ("aten.index_put_.default", "rng"),
        ("aten.index_put_.default", "write_race"),
    ]


def test_a_night_without_a_row_belongs_to_no_interval(tmp_path):
    write_night(tmp_path, "2026-11-01", row("resnet18"), row("vgg11"))
    write_night(tmp_path, "2026-11-02", row("vgg11"))
    write_night(tmp_path, "2026-11-03", row("resnet18"), row("vgg11"))
    assert intervals_of(load_history([tmp_path])) == [(0, 0, "pass"), (2, 2, "pass")]


def test_the_last_night_and_the_newest_trouble_are_whole_rows(tmp_path):
    trouble = differing(because="=1+1, a \"quoted\" 'word'", seconds=1.5)
    write_night(tmp_path, "2026-11-01", differing(because="older"))
    write_night(tmp_path, "2026-11-02", trouble)
    write_night(tmp_path, "2026-11-03", row("resnet18", seconds=2.5))
    (model,) = load_history([tmp_path]).models
    assert model.trouble
    assert model.trouble[:2] == (trouble, 1)
    assert model.newest == row("resnet18", seconds=2.5)


def test_a_model_that_is_gone_has_no_newest_row(tmp_path):
    write_night(tmp_path, "2026-11-01", row("resnet18"))
    write_night(tmp_path, "2026-11-02", row("vgg11"))
    gone = load_history([tmp_path]).models[0]
    assert (gone.key, gone.newest, gone.trouble) == (KEY, None, None)


def test_counts_and_environments_of_each_night(tmp_path):
    rows = (row("a", seconds=1.5), row("b", "crashed"), row("c", mode="inference", seconds=2.0))
    write_night(tmp_path, "2026-11-01", *rows, environment={"schema": 1, "key": "e1", "packages": {"torch": "2.14"}})
    write_night(tmp_path, "2026-11-02", *rows, environment={"schema": 1, "key": "e2", "packages": {"torch": "2.15"}})
    first, second = load_history([tmp_path]).nights
    assert (first.counts, first.changed) == ({"pass": 2, "crashed": 1}, ())
    assert [(one.key, one.base, one.new) for one in second.changed] == [("packages.torch", "2.14", "2.15")]


# ---------------------------------------------------------------------------------------------- which nights


def test_sweep_night_and_folder_can_be_named(tmp_path):
    night = write_night(tmp_path / "nights", "2026-11-02", row("a"), row("a", mode="inference"))
    write_night(tmp_path / "nights", "2026-11-01", row("a"))
    labels = {
        "a folder of nights": (find_nights([tmp_path / "nights"]), ["2026-11-01", "2026-11-02"]),
        "a night": (find_nights([night]), ["2026-11-02"]),
        "a sweep": (find_nights([night / "torchvision_training"]), ["torchvision_training"]),
        "a CSV": (find_nights([night / "torchvision_training" / "accuracy.csv"]), ["torchvision_training"]),
        "twice the same": (find_nights([night, night]), ["2026-11-02"]),
    }
    for what, (nights, expected) in labels.items():
        assert [one.label for one in nights] == expected, what


def test_modes_are_one_night_and_dated_sweeps_many(tmp_path):
    for mode in ("training", "inference"):
        write_sweep(tmp_path / "one" / mode, row("a", mode=mode))
    for day in (1, 2):
        write_sweep(tmp_path / "many" / f"2026-11-0{day}_torchvision_training", row("a"))
    assert len(find_nights([tmp_path / "one"])) == 1
    assert len(find_nights([tmp_path / "many"])) == 2


def test_nights_are_ordered_by_beginning_else_name(tmp_path):
    late = write_night(tmp_path, "aaa", row("a"))
    manifest = late / "torchvision_training" / "sweep.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"began": "2026-11-05T01:00:00+02:00"}))
    write_night(tmp_path, "2026-11-05_1200", row("a"))
    write_night(tmp_path, "2026-11-04", row("a"))
    nights = find_nights([tmp_path])
    assert [(one.label, one.when) for one in nights] == [
        ("2026-11-04", "2026-11-04T00:00:00+00:00"),
        ("aaa", "2026-11-04T23:00:00+00:00"),
        ("2026-11-05_1200", "2026-11-05T12:00:00+00:00"),
    ]


def test_night_without_sweeps_is_ordered_by_night_json(tmp_path):
    night = write_night(tmp_path, "2026-11-20", row("a"))
    selected = night / "torchvision_training" / "sweep.json"
    selected.write_text(json.dumps({**json.loads(selected.read_text()), "began": "2026-11-20T01:00:00+00:00"}))
    (tmp_path / "2026-11-20-again").mkdir()
    content = {"began": "2026-11-20T09:00:00+00:00", "parts": []}
    (tmp_path / "2026-11-20-again" / "night.json").write_text(json.dumps(content))
    assert [night.label for night in load_history([tmp_path]).nights] == ["2026-11-20", "2026-11-20-again"]


def test_until_leaves_later_nights_out(tmp_path):
    for day in (1, 2, 3):
        write_night(tmp_path, f"2026-11-0{day}", row("a"))
    history = load_history([tmp_path], until=tmp_path / "2026-11-02")
    assert [night.label for night in history.nights] == ["2026-11-01", "2026-11-02"]


# ------------------------------------------------------------------------------------------- what cannot be read


def first_row(change: Callable[[str], str]) -> Callable[[str], str]:
    """Changes the first line after the header."""

    def changed(text: str) -> str:
        header, line, *rest = text.splitlines(keepends=True)
        return "".join([header, change(line), *rest])

    return changed


DAMAGE = {
    "is cut off in its last line": lambda text: text[:-9],
    "is cut off and goes on": first_row(lambda line: line[:40] + "\n"),
    "has a column too many": lambda text: text.replace("accuracy,", "accuracy,colour,", 1),
    "has a cell too many": first_row(lambda line: line[:-1] + ",\n"),
    "lacks a cell": first_row(lambda line: line[:-2] + "\n"),
    "has a status that is none": lambda text: text.replace("pass", "psas", 1),
    "has one model twice": first_row(lambda line: line + line),
    "has no name in a row": lambda text: text.replace("resnet18", "", 1),
    "is empty": lambda _: "",
    "is binary": lambda _: "\0\1",
    "has an open quote": lambda text: text.replace("cpu,", '"cpu,', 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_csv_is_a_problem_or_an_error_if_named(tmp_path, damage):
    damaged = write_night(tmp_path, "2026-11-01", row("resnet18"), row("vgg11"), row("b", mode="inference"))
    write_night(tmp_path, "2026-11-02", row("resnet18"), row("vgg11"))
    path = damaged / "torchvision_training" / "accuracy.csv"
    path.write_text(damage(path.read_text()))
    history = load_history([tmp_path])
    (problem,) = history.nights[0].problems
    assert "2026-11-01/torchvision_training" in problem
    assert history.nights[0].counts == {"pass": 1}
    assert intervals_of(history) == [(1, 1, "pass")]
    with pytest.raises(HashbenchError, match=r"accuracy\.csv"):
        load_history([damaged])


def test_another_schema_is_named(tmp_path):
    write_night(tmp_path, "2026-11-01", row("a"), environment={"schema": 99, "key": "e"})
    write_night(tmp_path, "2026-11-02", row("a"))
    assert "schema 99" in load_history([tmp_path]).nights[0].problems[0]
    with pytest.raises(HashbenchError, match="schema 99"):
        load_history([tmp_path / "2026-11-01"])


def test_a_night_that_died_before_its_first_row_is_there(tmp_path):
    (tmp_path / "2026-11-02").mkdir()
    write_night(tmp_path, "2026-11-01", row("a"))
    night = load_history([tmp_path]).nights[1]
    assert (night.label, night.counts) == ("2026-11-02", {})
    assert "holds no accuracy.csv" in night.problems[0]


def test_nothing_that_can_be_read_is_an_error(tmp_path):
    with pytest.raises(HashbenchError, match="does not exist"):
        load_history([tmp_path / "nowhere"])
    with pytest.raises(HashbenchError, match=r"holds no accuracy\.csv"):
        load_history([tmp_path])
    write_night(tmp_path, "2026-11-01", row("a"), environment={"schema": 99, "key": "e"})
    with pytest.raises(HashbenchError, match=r"no night can be read: .*schema 99"):
        load_history([tmp_path])


def test_two_sweeps_of_one_night_cannot_both_have_a_model(tmp_path):
    night = write_night(tmp_path, "2026-11-01", row("a"))
    write_sweep(night / "again", row("a"))
    write_night(tmp_path, "2026-11-02", row("a"))
    assert "holds a (torchvision, training, float32, cpu) again" in load_history([tmp_path]).nights[0].problems[0]


# --------------------------------------------------------------------------------------------------- odd cells

ODD = {
    "names that a spreadsheet would execute": [row("=1+1"), row("'=a"), row("-x"), row("'plain")],
    "names with quotes and commas": [row('a"b'), row("a,b"), row("NA"), row("nan"), row("1e5"), row(" a ")],
    "errors with quotes and commas": [row("a", "crashed", error='said "no", then died'), row("b", seconds=0.25)],
    "letters beyond ASCII": [row("模型"), row("naïve"), row("b\N{NO-BREAK SPACE}")],
    "another suite in the same file": [row("a"), row("a", suite="timm"), row("a", dtype="amp")],
    "no rows": [],
}


@pytest.mark.parametrize("rows", ODD.values(), ids=ODD.keys())
def test_what_was_written_is_read(tmp_path, rows):
    path = write_sweep(tmp_path, *rows) / "accuracy.csv"
    assert list(load_file(path).rows) == rows
    newest = [model.newest for model in load_history([path]).models]
    assert sorted(newest, key=row_key) == sorted(rows, key=row_key)


def test_files_of_other_tools_and_times_are_read(tmp_path):
    dynamo = tmp_path / "2026-11-01" / "dynamo" / "accuracy.csv"
    crlf = tmp_path / "2026-11-02" / "crlf" / "accuracy.csv"
    for path, text in ((dynamo, "dev,name,batch_size,accuracy\ncpu,a,4,pass\n"), (crlf, None)):
        path.parent.mkdir(parents=True)
        path.write_bytes((text or (ROWS.header + ROWS.line(row("a"))).replace("\n", "\r\n")).encode())
    history = load_history([tmp_path])
    assert [night.counts for night in history.nights] == [{"pass": 1}, {"pass": 1}]
    assert history.models[0].intervals == (Interval(0, 0, "pass"),)


def test_the_newest_trouble_comes_first() -> None:
    old, new, over, fails = diagnosed("old"), diagnosed("new"), diagnosed("over"), failed("fails", suite="specimens")
    found = history([old, passing(new), over], [old, new, passing(over), fails])
    assert [model.key[-1] for _, model, _ in models_in_trouble(found)] == ["new", "fails", "old", "over"]


def test_a_night_without_a_row_is_in_no_interval() -> None:
    found = history([DIAGNOSED], [], [DIAGNOSED])
    assert found.models[0].at(1) is None
    assert found.models[0].at(None) is None
    assert found.models[0].at(2) == found.models[0].intervals[1]


def test_a_compiled_row_is_told_with_its_stage():
    assert seen(INACCURATE) == "fail_accuracy (cpp_fused_relu_0, codegen)"
    other = changed(INACCURATE, stage="lowering")
    (model,) = history([INACCURATE], [INACCURATE], [other]).models
    assert [(one.cause, one.nights) for one in model.intervals] == [("codegen", 2), ("lowering", 1)]
    assert seen(model.intervals[0]) == "fail_accuracy (cpp_fused_relu_0, codegen)"
