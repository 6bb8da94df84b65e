"""Rows survive the way through accuracy.csv; what is no accuracy.csv is refused in one line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import pytest

from hashbench.errors import HashbenchError
from hashbench.records import ROW_COLUMNS, ROW_SCHEMA, Row, RowEvidence
from hashbench.results.rows import ROWS, read_rows, row_from_json, row_to_json

from .rows import PLAIN, row, write_rows

FULL = Row(
    **{
        field.name: {
            "str": f"{field.name} text",
            "RowEvidence": RowEvidence("some"),
            "int | None": index,
            "float | None": index / 7,
        }[field.type]
        for index, field in enumerate(dataclasses.fields(Row))
    }
    | {"accuracy": "pass"}
)

SURVIVING_ROWS = {
    "a row with nothing but what is required": Row("cpu", "resnet18", None, "crashed"),
    "a row with every field filled": FULL,
    "zeros, which are not absent": row(benign=0, seconds=0.0, op_index=0),
    "a float that needs all its digits": row(seconds=0.1 + 0.2, max_abs_diff=5e-324),
    "infinity": row(max_abs_diff=math.inf, rate_low=-math.inf),
    "negative numbers": row(op_index=-1, max_abs_diff=-1e-7),
    "commas and quotes": row(error='expected "a", got "b"', detail='"'),
    "spaces at the ends": row(error=" padded "),
    "letters beyond ASCII": row(error="Größe → 模型 🙂"),
    "a formula": row(error="=cmd|' /C calc'!A0"),
    "texts that start like formulas": row(detail="+1", advice="-1", module="@home"),
    "a formula that already has an apostrophe": row(error="'=1+1", detail="''=1"),
    "an apostrophe before harmless text": row(error="'tis", detail="'"),
    "a text longer than the csv module's limit": row(error="x" * 200_000),
}


@pytest.mark.parametrize("original", SURVIVING_ROWS.values(), ids=SURVIVING_ROWS.keys())
def test_a_row_survives_the_csv(tmp_path, original):
    write_rows(tmp_path / "accuracy.csv", [original])
    assert read_rows(tmp_path / "accuracy.csv") == [original]


@pytest.mark.parametrize("original", SURVIVING_ROWS.values(), ids=SURVIVING_ROWS.keys())
def test_a_row_survives_json(original):
    assert row_from_json(json.loads(json.dumps(row_to_json(original)))) == original


def test_not_a_number_survives(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [row(max_abs_diff=math.nan)])
    assert math.isnan(read_rows(tmp_path / "accuracy.csv")[0].max_abs_diff)


def test_appending_lines_and_writing_at_once_give_the_same_file(tmp_path):
    write_rows(tmp_path / "accuracy.csv", [PLAIN, row("vgg11")])
    appended = ROWS.header + ROWS.line(PLAIN) + ROWS.line(row("vgg11"))
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
    "a list in JSON": (b"[]\n", "is not a CSV: it looks like JSON"),
    "an HTML page": (b"<!DOCTYPE html>\n", "is not a CSV: it looks like HTML"),
    "rows without a header": (GOOD.encode(), "is not a CSV of accuracies"),
    "another CSV": (b"x,y\n1,2\n", "is not a CSV of accuracies"),
    "no accuracy column": (b"dev,name,batch_size\n", "lacks the columns accuracy"),
    "no dev and no batch size": (b"name,accuracy\n", "lacks the columns dev, batch_size"),
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
    "a status of dynamo's": ((HEADER + "cpu,a,4,fail_accuracy,\n").encode(), "accuracy 'fail_accuracy'"),
    "a row without a status": ((HEADER + "cpu,a,4,,\n").encode(), "line 2 of PATH has no accuracy"),
    "a row without a name": ((HEADER + "cpu,,4,pass,\n").encode(), "line 2 of PATH has no name"),
    "a batch size that is no number": ((HEADER + "cpu,a,four,pass,\n").encode(), "'four' as batch_size"),
    "a batch size that is not whole": ((HEADER + "cpu,a,4.0,pass,\n").encode(), "'4.0' as batch_size"),
    "a number with an underscore": ((HEADER + "cpu,a,1_0,pass,\n").encode(), "'1_0' as batch_size"),
    "a number in other digits": ((HEADER + "cpu,a,٤,pass,\n").encode(), "'٤' as batch_size"),
    "a number with a space": ((HEADER + "cpu,a, 4,pass,\n").encode(), "' 4' as batch_size"),
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
    with pytest.raises(HashbenchError, match=f"schema {ROW_SCHEMA + 1} .*{name}"):
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
        {"name": 3},
        {"batch_size": "4"},
        {"batch_size": 4.0},
        {"batch_size": True},
        {"seconds": "1.0"},
        {"seconds": True},
        {"accuracy": "fine"},
        {"accuracy": ""},
    ],
    ids=str,
)
def test_json_that_is_not_a_row_is_refused(change):
    with pytest.raises(ValueError, match="not a row"):
        row_from_json(row_to_json(PLAIN) | change)


@pytest.mark.parametrize("column", ROW_COLUMNS)
def test_json_that_lacks_a_field_is_refused(column):
    fields = row_to_json(PLAIN)
    del fields[column]
    with pytest.raises(ValueError, match=f"not a row: it has other fields: {column}"):
        row_from_json(fields)


def test_a_whole_number_is_taken_for_a_float():
    assert row_from_json(row_to_json(PLAIN) | {"seconds": 2}).seconds == 2.0
