"""Rows survive the way through accuracy.csv, what a user may name becomes a sweep, all else is refused in one line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hashbench import __version__
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import facts_kinds
from hashbench.core.io import UnknownContentError
from hashbench.core.records import ROW_SCHEMA, ExperimentResult, Row, RowEvidence
from hashbench.core.results.load import Requested, kind_of_csv, load_sweep
from hashbench.core.results.rows import ROWS, read_rows, row_from_json, row_to_json
from tests.core.report.rows import PLAIN, row, selection, write_rows, write_sweep
from tests.flat_rows import changed, made

OF_WORDS = {
    "accuracy": "pass",
    "latent": "load",
    "stressed": "threads 0/5; load 2/6; process not run (out of time; it was killed)",
}
"""Values of columns that hold words of their own."""
FULL = made(
    **{
        name: {
            str: f"{name} text",
            RowEvidence: RowEvidence("some"),
            int: index,
            float: index / 100,
        }[kind]
        for index, (name, kind) in enumerate(ROWS.types.items())
    }
    | {name: value for name, value in OF_WORDS.items() if name in ROWS.types}
)

PIECES = ["=1", "+1", "-1", "@home", "'", '"', ",", ";", " ", "a", "Größe → 模型 🙂", "=cmd|' /C calc'!A0"]
VALUES = {
    str: lambda *_: st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    int: lambda least=-(10**18), most=10**18: st.integers(int(least), int(most)),
    float: lambda *between: st.floats(*between, allow_nan=False),
    RowEvidence: lambda *_: st.just(RowEvidence()),
}
FILLED = {name: VALUES[kind](*ROWS.columns[name].column.between or ()) for name, kind in ROWS.types.items()}
FILLED |= {name: st.just(value) for name, value in OF_WORDS.items() if name in FILLED}
REQUIRED = ("dev", "name", "batch_size", "accuracy")
GIVEN = {name: FILLED.pop(name).filter(lambda value: value != "") for name in REQUIRED}


@given(st.fixed_dictionaries(GIVEN, optional=FILLED).map(lambda columns: made(**columns)))
@example(Row("cpu", "resnet18", None, "crashed"))
@example(FULL)
@example(row(benign=0, seconds=0.0, op_index=0, error="x" * 200_000))
def test_a_row_survives_the_csv_and_json(tmp_path, original):
    write_rows(tmp_path / "accuracy.csv", [original])
    assert read_rows(tmp_path / "accuracy.csv") == [original]
    assert row_from_json(json.loads(json.dumps(row_to_json(original)))) == original


def test_not_a_number_survives(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [row(max_abs_diff=math.nan)])
    assert math.isnan(read_rows(tmp_path / "accuracy.csv")[0].max_abs_diff)


def test_appending_lines_and_writing_at_once_give_the_same_file(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [PLAIN, row("vgg11")])
    columns = ROWS.written([PLAIN])
    appended = ",".join(columns) + "\n" + ROWS.line(PLAIN, columns) + ROWS.line(row("vgg11"), columns)
    assert (tmp_path / "accuracy.csv").read_text() == appended


def test_absent_is_an_empty_cell_and_never_zero():
    cells = next(csv.reader([ROWS.line(Row("cpu", "resnet18", None, "timeout"))]))
    assert [cell for cell in cells if cell] == ["cpu", "resnet18", "timeout"]


def test_columns_begin_as_dynamos_do():
    assert ROWS.header.startswith("dev,name,batch_size,accuracy,")


@pytest.mark.parametrize(
    ("text", "flat"),
    [
        ("Traceback:\n  File\r\n\r\nError\n", "Traceback: File Error"),
        ("a\tb\x0bc\x85d\u2028e\u2029f", "a b c d e f"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("a\0b", "a b"),
        ("name\udcff", "name\\udcff"),
        ("two  spaces stay", "two  spaces stay"),
    ],
    ids=["a traceback", "every line break", "terminal colours", "a zero byte", "a lone surrogate", "spaces"],
)
def test_a_row_is_one_physical_line(tmp_path, text, flat):
    line = ROWS.line(row(error=text))
    assert line.count("\n") == 1
    assert len(line.splitlines()) == 1
    write_rows(tmp_path / "accuracy.csv", [row(error=text)])
    assert read_rows(tmp_path / "accuracy.csv")[0].error == flat


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_no_text_cell_starts_as_a_formula(start):
    cells = next(csv.reader(io.StringIO(ROWS.line(row(f"{start}1", error=f"{start}2")))))
    assert not [cell for cell in cells if cell.startswith(start)]


def test_negative_numbers_are_not_defused():
    assert ",-1.5," in ROWS.line(row(rate_low=-1.5))


def test_a_file_that_excel_saved_is_read(tmp_path):
    path = tmp_path / "accuracy.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (ROWS.header + ROWS.line(PLAIN)).replace("\n", "\r\n").encode())
    assert read_rows(path) == [PLAIN]


def test_columns_may_be_few_and_in_any_order(tmp_path):
    path = tmp_path / "accuracy.csv"
    path.write_text("name,accuracy,dev,batch_size,kernel\nresnet18,eager_two_runs_differ,cpu,4,aten.dot.default\n")
    assert read_rows(path) == [Row("cpu", "resnet18", 4, "eager_two_runs_differ", kernel="aten.dot.default")]


def test_the_limit_of_the_csv_module_is_put_back(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [PLAIN])
    before = csv.field_size_limit(1000)
    try:
        read_rows(tmp_path / "accuracy.csv")
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


# ------------------------------------------------------------------------------------------------- refused

HEADER = "dev,name,batch_size,accuracy,error\n"
GOOD = "cpu,resnet18,4,pass,\n"

REFUSED = {
    "nothing": (b"", "is empty"),
    "only blank lines": (b"\n\n", "is empty"),
    "binary data": (b"\x89PNG\r\n\x1a\n\0\0", "is not a CSV: it is not UTF-8 text"),
    "zero bytes": (b"dev,name\0\n", "is not a CSV: it holds binary data"),
    "JSON": (b'{"dev": "cpu"}\n', "is not a CSV: it looks like JSON"),
    "an HTML page": (b"<!DOCTYPE html>\n", "is not a CSV: it looks like HTML"),
    "another CSV": (b"x,y\n1,2\n", "is not a CSV of accuracies"),
    "no accuracy column": (b"dev,name,batch_size\n", "lacks the columns accuracy"),
    "a column of another version": ((HEADER[:-1] + ",flops\n").encode(), "does not know: flops"),
    "a column twice": ((HEADER[:-1] + ",error\n").encode(), "names a column twice: error"),
    "a last line without end": ((HEADER + GOOD + GOOD[:-1]).encode(), "is cut off"),
    "a header that is cut off": (b"dev,name,batch_si", "is cut off"),
    "a cut row": ((HEADER + GOOD + "cpu,vgg11\n").encode(), "line 3 of PATH: 2 cells where the header has 5"),
    "a row with too many cells": (
        (HEADER + "cpu,vgg11,4,pass,,,\n").encode(),
        "cannot read PATH: Expected 5 fields in line 2, saw 7",
    ),
    "a quote that nobody closes": ((HEADER + 'cpu,vgg11,4,pass,"no end\n').encode(), "line 2 of PATH"),
    "a cell over two lines": ((HEADER + 'cpu,vgg11,4,pass,"a\nb"\n').encode(), "line 2 of PATH: a quoted cell spreads"),
    "the same model twice": ((HEADER + GOOD + GOOD).encode(), "resnet18 (cpu) twice: lines 2 and 3"),
    "a status that is none": ((HEADER + "cpu,a,4,passed,\n").encode(), "accuracy 'passed'"),
    "a row without a status": (
        (HEADER + "cpu,a,4,,\n").encode(),
        "line 2 of PATH: the required column 'accuracy' is empty",
    ),
    "a row without a name": (
        (HEADER + "cpu,,4,pass,\n").encode(),
        "line 2 of PATH: the required column 'name' is empty",
    ),
    "a batch size that is no number": ((HEADER + "cpu,a,four,pass,\n").encode(), "'four' as batch_size"),
    "a number with an underscore": ((HEADER + "cpu,a,1_0,pass,\n").encode(), "'1_0' as batch_size"),
    "a number in other digits": ((HEADER + "cpu,a,٤,pass,\n").encode(), "'٤' as batch_size"),
    "a number of 5000 digits": ((HEADER + f"cpu,a,{'9' * 5000},pass,\n").encode(), "as batch_size"),
}


@pytest.mark.parametrize(("content", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_accuracy_csv_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "accuracy.csv"
    path.write_bytes(content)
    with pytest.raises(HashbenchError) as refusal:
        read_rows(path)
    message = str(refusal.value)
    assert says in message.replace(str(path), "PATH")
    assert "\n" not in message


def test_the_good_rows_of_these_tests_are_read(tmp_path):
    (tmp_path / "a.csv").write_text(HEADER + GOOD + "\n" + GOOD.replace("resnet18", "vgg11"))
    assert [one.name for one in read_rows(tmp_path / "a.csv")] == ["resnet18", "vgg11"]


def test_a_near_miss_of_a_status_gets_the_nearest_word(tmp_path):
    (tmp_path / "a.csv").write_text(HEADER + "cpu,a,4,eager_two_runs_differs,\n")
    with pytest.raises(HashbenchError, match="Did you mean eager_two_runs_differ"):
        read_rows(tmp_path / "a.csv")


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(HashbenchError, match="cannot read"):
            read_rows(path)


@pytest.mark.parametrize("name", ["environment.json", "accuracy.environment.json"])
def test_another_schema_is_refused_by_name(tmp_path, name):
    write_rows(tmp_path / "accuracy.csv", [PLAIN])
    (tmp_path / name).write_text(json.dumps({"schema": ROW_SCHEMA}))
    assert read_rows(tmp_path / "accuracy.csv") == [PLAIN]
    (tmp_path / name).write_text(json.dumps({"schema": ROW_SCHEMA + 1}))
    with pytest.raises(HashbenchError, match=f"schema {ROW_SCHEMA + 1} .*{name}.* this is hashbench {__version__} "):
        read_rows(tmp_path / "accuracy.csv")


def test_a_csv_with_a_column_of_another_version_is_refused_with_both_named(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [PLAIN])
    lines = (tmp_path / "accuracy.csv").read_text().splitlines()
    (tmp_path / "accuracy.csv").write_text(f"{lines[0]},newer\n{lines[1]},1\n")
    (tmp_path / "environment.json").write_text(json.dumps({"schema": ROW_SCHEMA, "packages": {"hashbench": "9.8.7"}}))
    with pytest.raises(HashbenchError, match=rf"newer: hashbench 9\.8\.7 wrote it .* this is hashbench {__version__} "):
        read_rows(tmp_path / "accuracy.csv")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_an_environment_that_cannot_be_read_is_refused(tmp_path, content):
    write_rows(tmp_path / "accuracy.csv", [PLAIN])
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(HashbenchError, match=r"environment\.json"):
        read_rows(tmp_path / "accuracy.csv")


# ---------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "change",
    [
        {"flops": 1},
        {"name": None},
        {"batch_size": "4"},
        {"batch_size": True},
        {"seconds": "1.0"},
        {"accuracy": "fine"},
    ],
    ids=str,
)
def test_json_that_is_not_a_row_is_refused(change):
    with pytest.raises(ValueError, match="not a row"):
        row_from_json(row_to_json(PLAIN) | change)


def test_a_field_that_json_lacks_has_its_default():
    fields = row_to_json(PLAIN)
    full = row_to_json(FULL)
    defaults = {one.name: one.default for kind in (Row, *facts_kinds()) for one in dataclasses.fields(kind)}
    for column in ROWS.columns.keys() - {*REQUIRED, "evidence"}:
        lacking = {name: value for name, value in full.items() if name != column}
        assert row_from_json(lacking) == changed(FULL, **{column: defaults[column]})
    assert row_from_json({name: fields[name] for name in REQUIRED}) == Row(*(fields[name] for name in REQUIRED))


@pytest.mark.parametrize("column", REQUIRED)
def test_json_that_lacks_a_field_without_a_default_is_refused(column):
    fields = row_to_json(PLAIN)
    del fields[column]
    with pytest.raises(ValueError, match=f"not a row: it lacks the fields {column}"):
        row_from_json(fields)


@pytest.mark.parametrize(
    "change", [{"newer": 1}, {"accuracy": "newer"}, {"latent": "newer"}, {"schema": ROW_SCHEMA + 1}], ids=str
)
def test_json_of_another_version_names_both(change):
    with pytest.raises(UnknownContentError, match=rf"hashbench 9\.8\.7 wrote it .* this is hashbench {__version__} "):
        row_from_json({**row_to_json(PLAIN), "hashbench": "9.8.7", **change})


def test_evidence_of_another_version_is_told_from_damaged_evidence():
    fields = row_to_json(
        dataclasses.replace(PLAIN, evidence=RowEvidence.of([ExperimentResult("repeat", "call", 2, 1)]))
    )
    (result,) = fields["evidence"]["results"]
    assert row_from_json(fields).evidence.results == (ExperimentResult("repeat", "call", 2, 1),)
    result["newer"] = 1
    with pytest.raises(UnknownContentError, match="newer"):
        row_from_json(fields)
    del result["newer"], result["name"]
    with pytest.raises(ValueError, match="lacks the fields name") as caught:
        row_from_json(fields)
    assert not isinstance(caught.value, UnknownContentError)


def test_a_whole_number_is_taken_for_a_float():
    assert row_from_json(row_to_json(PLAIN) | {"seconds": 2}).seconds == 2.0


ENVIRONMENT = {"schema": 1, "key": "e1", "torch": "2.15.0"}


def test_a_results_folder_and_its_csv_are_the_same_sweep(tmp_path):
    folder = write_sweep(tmp_path / "r", PLAIN, environment=ENVIRONMENT)
    from_folder, from_file = load_sweep(folder), load_sweep(folder / "accuracy.csv")
    assert from_folder.rows == from_file.rows == (PLAIN,)
    assert from_folder.environments == {"e1": ENVIRONMENT}
    assert (from_folder.kind, from_folder.label) == ("hashbench", str(folder))


def test_subfolders_make_one_sweep(tmp_path):
    for mode in ("training", "inference"):
        options = {"mode": mode, "device": "cpu", "dtype": "amp", "threads": 2}
        asked = {"models": [["torchvision", "resnet18"]], "options": options}
        write_sweep(tmp_path / mode, row(mode=mode), environment=ENVIRONMENT, selection=asked)
    loaded = load_sweep(tmp_path)
    assert {one.mode for one in loaded.rows} == {"training", "inference"}
    assert set(loaded.selections) == {
        Requested(frozenset({("torchvision", "resnet18")}), mode=mode, device="cpu", dtype="amp")
        for mode in ("training", "inference")
    }


def test_expected_csvs_bring_their_own_environments(tmp_path):
    for number, mode in enumerate(("training", "inference")):
        write_rows(tmp_path / f"{mode}.csv", [row(mode=mode, env=f"e{number}")])
        content = {"schema": 1, "key": f"e{number}", "threads": number}
        (tmp_path / f"{mode}.environment.json").write_text(json.dumps(content))
    environments = load_sweep(tmp_path).environments
    assert {key: environment["threads"] for key, environment in environments.items()} == {"e0": 0, "e1": 1}


def test_a_resumed_sweep_has_the_environments_of_all_its_parts(tmp_path):
    content = {"key": "e2", "torch": "2.15", "previous": [{"key": "e1", "torch": "2.14"}]}
    loaded = load_sweep(write_sweep(tmp_path / "r", PLAIN, environment=content))
    assert loaded.environments == {"e2": {"key": "e2", "torch": "2.15"}, "e1": {"key": "e1", "torch": "2.14"}}


def test_a_user_folder_without_json_loads(tmp_path):
    loaded = load_sweep(write_sweep(tmp_path / "r", PLAIN))
    assert (loaded.environments, loaded.selections) == ({}, ())


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.mkdir()], ids=["nothing there", "an empty folder"])
def test_a_path_without_csv_is_refused(tmp_path, make):
    make(tmp_path / "r")
    with pytest.raises(HashbenchError, match=r"accuracy\.csv"):
        load_sweep(tmp_path / "r")


def test_the_same_model_in_two_files_is_refused(tmp_path):
    for part in ("a", "b"):
        write_sweep(tmp_path / part, PLAIN)
    with pytest.raises(HashbenchError, match="twice"):
        load_sweep(tmp_path)


@pytest.mark.parametrize("schema", [0, 99, "2", None, []])
def test_a_selection_of_another_schema_is_named_and_refused(tmp_path, schema):
    asked = selection(PLAIN) | {"schema": schema}
    with pytest.raises(HashbenchError, match=r"sweep\.json has schema .* this is hashbench"):
        load_sweep(write_sweep(tmp_path / "r", PLAIN, selection=asked))


DAMAGED_SELECTIONS = {
    "says nothing": {},
    "no options": {"models": [["t", "a"]]},
    "models without suites": selection(PLAIN) | {"models": ["resnet18"]},
    "models that are no list": selection(PLAIN) | {"models": 3},
    "options that are a list": {"models": [], "options": []},
}


@pytest.mark.parametrize("asked", DAMAGED_SELECTIONS.values(), ids=DAMAGED_SELECTIONS)
def test_a_damaged_selection_is_refused(tmp_path, asked):
    with pytest.raises(HashbenchError, match=r"sweep\.json"):
        load_sweep(write_sweep(tmp_path / "r", PLAIN, selection=asked))


# -------------------------------------------------------------------------------------------------- dynamo

DYNAMO = """\
dev,name,batch_size,accuracy,calls_captured,unique_graphs,graph_breaks,compilation_latency
cpu,resnet18,4,pass,100,1,0,12.345678
cpu,vgg11,0,model_fail_to_load,0,0,0,0
cpu,swin,0,eager_fail_to_run
cpu,alexnet,4,fail_accuracy,8,1,0,1.0
"""

EXPECTED = "name,accuracy,graph_breaks\n\n\n\nresnet18,pass,0\n\n\n\nvgg11,eager_two_runs_differ,7\n"


def test_dynamos_accuracy_csv_is_read_with_its_own_words(tmp_path):
    (tmp_path / "inductor.csv").write_text(DYNAMO.replace("\n", "\r\n"), newline="")
    loaded = load_sweep(tmp_path / "inductor.csv")
    assert loaded.kind == "dynamo"
    assert loaded.rows == (
        Row("cpu", "resnet18", 4, "pass"),
        Row("cpu", "vgg11", None, "model_fail_to_load"),
        Row("cpu", "swin", None, "eager_fail_to_run"),
        Row("cpu", "alexnet", 4, "fail_accuracy"),
    )


def test_dynamos_tag_column_holds_the_status_of_a_padded_row(tmp_path):
    text = "dev,name,batch_size,tag,accuracy,calls_captured\ncpu,a,4,nightly,pass,3\ncpu,b,0,timeout,0,0\n"
    (tmp_path / "d.csv").write_text(text)
    assert [one.accuracy for one in load_sweep(tmp_path / "d.csv").rows] == ["pass", "timeout"]


def test_dynamos_expected_csv_is_read(tmp_path):
    (tmp_path / "inductor_torchbench_training.csv").write_text(EXPECTED)
    loaded = load_sweep(tmp_path)
    assert loaded.kind == "dynamo_expected"
    assert loaded.rows == (Row("", "resnet18", None, "pass"), Row("", "vgg11", None, "eager_two_runs_differ"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,0,0\n", "'0' as accuracy"),
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,1.234,0\n", "as accuracy"),
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,pass,0,9\n", "Expected 5 fields in line 2, saw 6"),
        ("dev,name,batch_size,speedup\ncpu,a,4,1.1\n", "lacks the columns accuracy"),
        ("name,accuracy\na,pass\na,pass\n", "twice: lines 2 and 3"),
        ("name,accuracy\na\n", "'' as accuracy"),
    ],
    ids=["no status", "a number", "too many cells", "a performance run", "the same model twice", "a cut row"],
)
def test_a_damaged_dynamo_file_is_refused(tmp_path, text, says):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(HashbenchError, match=says):
        load_sweep(tmp_path / "d.csv")


def test_files_of_two_kinds_make_no_sweep(tmp_path):
    (tmp_path / "a.csv").write_text(DYNAMO)
    (tmp_path / "b.csv").write_text(EXPECTED)
    with pytest.raises(HashbenchError, match="mixes files of dynamo and dynamo_expected"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("dev,name,batch_size,accuracy,suite,mode", "hashbench"),
        ("dev,name,batch_size,accuracy,suite,mode,a_newer_column", "hashbench"),
        ("dev,name,batch_size,accuracy,calls_captured", "dynamo"),
        ("dev,name,batch_size,accuracy", "dynamo"),
        ("name,accuracy", "dynamo_expected"),
        ("x,y", "hashbench"),
    ],
)
def test_the_header_tells_who_wrote_a_csv(header, kind):
    assert kind_of_csv(header.split(",")) == kind
