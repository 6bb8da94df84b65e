"""Characters that steer a terminal, the direction of text, or a parser: no output has them, whatever names hold."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from command_helpers import Main
from repro_helpers import aten, captured, document_in, said_of, signed_again

from hashbench.cli.flags import say
from hashbench.records import Leaf, OpRecord, Row, TensorDigest, Trace
from hashbench.report.compare import compare
from hashbench.report.exports import as_annotations, as_junit, as_markdown
from hashbench.report.page import render_html
from hashbench.report.table import sweep_table
from hashbench.report.text import as_csv, as_text
from hashbench.report.text import as_markdown as compared_markdown
from hashbench.repro import write_repro
from hashbench.text import cut_line, five_lines, one_line, printable
from hashbench.trace import file
from tests.report.histories import DIAGNOSED, judged, passing
from tests.report.rows import sweep

CONTROLS = [chr(code) for code in range(0x20) if chr(code) not in "\t\n"] + [chr(code) for code in range(0x7F, 0xA0)]
DIRECTIONS = [*"\u061c\u200e\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]
OTHERS = ["\u2028", "\u2029", "\ud800", "\udfff"]
STEERING = "".join([*CONTROLS, *DIRECTIONS, *OTHERS])
NAME = f"a{STEERING}b"
ENCODED = re.sub("[\x00\ud800\udfff]", "", NAME)
"""What a file in UTF-8, or its name, can hold of it."""
FINE = "Größe µ 模型 עברית — a\u200db\n\tc"


def steers(text: str) -> set[str]:
    """The characters in ``text`` that it must not have."""
    return set(text) & set(STEERING)


def test_what_steers_is_shown_as_an_escape_and_all_else_as_it_is() -> None:
    assert printable("a\x1b[31m\u202eb\x9b") == "a\\x1b[31m\\u202eb\\x9b"
    assert steers(printable(NAME)) == steers(one_line(NAME)) == steers(cut_line(NAME)) == set()
    assert printable(FINE) == FINE
    assert one_line("a\u202eb\udc80\x1b\tc") == "a\\u202eb\\udc80 c"
    assert {unicodedata.category(letter) for letter in STEERING} == {"Cc", "Cf", "Zl", "Zp", "Cs"}


def texts_of(row: Row, folder: Path) -> dict[str, str]:
    night, comparison = judged([passing(row)], [row]), compare(sweep(passing(row)), sweep(row))
    return {
        "table": sweep_table([row]),
        "compared": as_text(comparison),
        "compared, Markdown": compared_markdown(comparison),
        "compared, CSV": as_csv(comparison),
        "page": render_html(night, title=NAME),
        "junit": as_junit(night, tracebacks=dict.fromkeys((night.judgements[0].key,), f"Traceback\n{NAME}")),
        "markdown": as_markdown(night),
        "annotations": as_annotations(night),
        "pytest": five_lines(row, folder=folder),
    }


def test_no_report_has_them(tmp_path: Path) -> None:
    texts = {field.name: NAME for field in dataclasses.fields(Row) if field.type == "str" and field.name not in KEPT}
    texts |= dict.fromkeys(("suite", "name", "mode"), ENCODED)  # in file names
    found = texts_of(dataclasses.replace(DIAGNOSED, **texts), tmp_path)
    assert {name: steers(text) for name, text in found.items()} == {name: set() for name in found}
    ElementTree.fromstring(found["junit"])
    for text in found.values():
        text.encode()


KEPT = ("accuracy", "mode", "origin", "latent", "stressed", "cause", "confidence", "repro", "traces")


def test_no_traces_difference_has_them(tmp_path: Path, main: Main) -> None:
    for name, value in (("a", "00"), ("b", "11")):
        leaf = Leaf("input/0", "input", TensorDigest("float32", (1,), (1,), "00" * 8), 0)
        output = TensorDigest("float32", (1,), (1,), value * 8)
        op = OpRecord(
            f"forward.0/{ENCODED}/aten.add#0",
            "forward",
            0,
            ENCODED,
            f"aten.add{ENCODED}",
            outputs=(output,),
            source=ENCODED,
        )
        file.write(Trace((op,), (leaf,)), tmp_path / f"{name}.log")
    done = main("diff", "a.log", "b.log", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "\\u202e" in done.stdout
    assert steers(done.stdout) == set()


def test_nothing_of_a_call_reaches_the_terminal(tmp_path: Path, main: Main) -> None:
    call = captured(aten.addmv.default, torch.zeros(3), torch.ones(3, 3), torch.ones(3))
    write_repro(tmp_path / "repro", call, said_of(op=call.op))
    found = document_in(tmp_path / "repro")
    found["recorded"]["decision"].update(cause=NAME, because=NAME, confidence=NAME)
    found["recorded"]["environment"].update(torch=NAME, cores=NAME)
    signed_again(tmp_path / "repro", found)
    done = main("replay", "repro", "--replays", "2", "--budget", "5", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "recorded cause: a\\x00" in done.stdout
    assert steers(done.stdout) == set()
    found["op"] = f"aten.{NAME}.default"
    signed_again(tmp_path / "repro", found)
    done = main("replay", "repro", cwd=tmp_path)
    assert done.returncode == 2
    assert steers(done.stderr) == set()


def test_no_report_of_a_repro_has_them(tmp_path: Path) -> None:
    call = captured(aten.addmv.default, torch.zeros(3), torch.ones(3, 3), torch.ones(3))
    diagnosis = said_of(op=call.op)
    bad = dataclasses.replace(diagnosis, decision=dataclasses.replace(diagnosis.decision, because=ENCODED))
    write_repro(tmp_path / "repro", dataclasses.replace(call, module=ENCODED), bad)
    assert steers((tmp_path / "repro" / "REPORT.md").read_text(encoding="utf-8")) == set()


def test_no_error_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert say(f"cannot read {NAME}", 2) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), steers(said)) == (1, set())
    assert re.search(r"\\x1b.*\\u202e.*\\ud800", said)
    assert json.dumps(NAME).isprintable()  # so JSON needs nothing
