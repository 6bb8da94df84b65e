"""Numbers and rows in words; and characters that steer a terminal, the direction of text, or a parser, which no output
has."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from command_helpers import Main
from repro_helpers import aten, captured, document_in, said_of, signed_again

from hashbench.cli.flags import say
from hashbench.core.diagnose.repro import write_repro
from hashbench.core.finding.row import row_finding
from hashbench.core.records import Leaf, OpRecord, Row, TensorDigest, Trace
from hashbench.core.report.compare import compare
from hashbench.core.report.table import sweep_table
from hashbench.core.report.text import as_csv, as_text
from hashbench.core.report.text import as_markdown as compared_markdown
from hashbench.core.text import (
    cut_line,
    deterministic_here,
    duration,
    ending,
    format_ranks,
    how_much,
    how_often,
    is_replayable,
    masked,
    mebibytes,
    one_line,
    percent,
    printable,
    shorten,
    spaced,
)
from hashbench.core.trace import file
from tests.core.report.rows import sweep

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


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\u202eb\x9b") == "a\\x1b[31m\\u202eb\\x9b"
    assert steers(printable(NAME)) == steers(one_line(NAME)) == steers(cut_line(NAME)) == set()
    assert printable(FINE) == FINE
    assert one_line("a\u202eb\udc80\x1b\tc") == "a\\u202eb\\udc80 c"
    assert {unicodedata.category(letter) for letter in STEERING} == {"Cc", "Cf", "Zl", "Zp", "Cs"}


def texts_of(row: Row, folder: Path) -> dict[str, str]:
    exports, page = (pytest.importorskip(f"hashbench.extensions.report.{name}") for name in ("exports", "page"))
    before = pytest.importorskip("tests.extensions.report.histories")
    night, comparison = before.judged([before.passing(row)], [row]), compare(sweep(before.passing(row)), sweep(row))
    return {
        "table": sweep_table([row]),
        "compared": as_text(comparison),
        "compared, Markdown": compared_markdown(comparison),
        "compared, CSV": as_csv(comparison),
        "page": page.render_html(night, title=NAME),
        "junit": exports.as_junit(night, tracebacks=dict.fromkeys((night.judgements[0].key,), f"Traceback\n{NAME}")),
        "markdown": exports.as_markdown(night),
        "annotations": exports.as_annotations(night),
        "pytest": str(row_finding(row, folder=folder)),
    }


def test_no_report_has_them(tmp_path: Path) -> None:
    texts = {field.name: NAME for field in dataclasses.fields(Row) if field.type == "str" and field.name not in KEPT}
    texts |= dict.fromkeys(("suite", "name", "mode"), ENCODED)  # in file names
    diagnosed = pytest.importorskip("tests.extensions.report.histories").DIAGNOSED
    found = texts_of(dataclasses.replace(diagnosed, **texts), tmp_path)
    assert {name: steers(text) for name, text in found.items()} == {name: set() for name in found}
    ElementTree.fromstring(found["junit"])
    for text in found.values():
        text.encode()


KEPT = ("accuracy", "mode", "origin", "latent", "stressed", "cause", "confidence", "repro", "traces")


def test_no_diff_of_traces_has_them(tmp_path: Path, main: Main) -> None:
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


@pytest.mark.slow
def test_nothing_of_a_call_reaches_the_terminal(tmp_path: Path, main: Main) -> None:
    call = captured(aten.addmv.default, torch.zeros(3), torch.ones(3, 3), torch.ones(3))
    write_repro(tmp_path / "repro", call, said_of(op=call.op))
    found = document_in(tmp_path / "repro")
    found["recorded"]["decision"].update(cause=NAME, because=NAME, confidence=NAME)
    found["recorded"]["environment"].update(torch=NAME, cores=NAME)
    signed_again(tmp_path / "repro", found)
    done = main("replay", "repro", "--replays", "2", "--budget", "5", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "recorded cause:   a\\x00" in done.stdout
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


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0 s"),
        (0.4, "0.4 s"),
        (2, "2 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (3600, "60 min"),
        (11_100, "3 h 5 min"),
        (7200, "2 h"),
        (100 * 3600, "4 d 4 h"),
        (48 * 3600, "2 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("mib", "text"), [(0.4, "0 MiB"), (820, "820 MiB"), (1024, "1.0 GiB"), (16_282, "15.9 GiB")])
def test_memory(mib: float, text: str) -> None:
    assert mebibytes(mib) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.0004, "under 0.1 %"),
        (0.0123, "1.2 %"),
        (0.05, "5 %"),
        (0.0996, "10 %"),
        (0.36, "36 %"),
        (0.996, "over 99 %"),
        (1, "100 %"),
    ],
)
def test_percentages(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((1,), "rank 1"), ((0, 2), "ranks 0, 2"), (range(64), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more")],
)
def test_ranks(ranks: Iterable[int], text: str) -> None:
    assert format_ranks(ranks) == text


class UntoldError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, ""),
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (SystemExit(3), "exit code 3"),
        (ValueError("no\nsuch"), "ValueError: no such"),
        (UntoldError(), "UntoldError: its text cannot be made"),
    ],
    ids=range(6),
)
def test_how_an_exception_ends_a_program(error: BaseException | None, text: str) -> None:
    assert ending(error) == text
    assert len(ending(ValueError("\udcff\n" + "y" * 10**6))) == 200


def test_distances_that_are_no_rounding_have_no_ulp() -> None:
    near, far = Row("cpu", "x", 1, "pass", max_ulp=2**24), Row("cpu", "x", 1, "pass", max_ulp=2**24 + 1)
    assert how_much(near) == f"{spaced(2**24)} units in the last place"
    assert how_much(dataclasses.replace(far, max_abs_diff=2.0)) == "at most 2 apart"
    assert how_much(dataclasses.replace(near, max_ulp=1, count_variability=1.0, differing_elements=7)) == (
        "7 elements (100 %), 1 unit in the last place"
    )


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (0.94, "identical, at no cost that could be measured"),
        (1.7, "identical, at no cost that could be measured"),
        (2.4, "identical, which takes about 2x as long"),
        (None, "identical"),
    ],
)
def test_a_price_within_the_noise_is_none(price: float | None, said: str) -> None:
    row = Row("cpu", "x", 1, "pass", deterministic_here="identical", deterministic_price=price)
    assert deterministic_here(row) == said


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abcdefghij", 10, "abcdefghij"), ("abcdefghijk", 10, "abcde…hijk"), ("abcdef", 3, "a…f"), ("", 3, "")],
)
def test_long_texts_are_cut_in_the_middle(text, width, short):
    assert shorten(text, width) == short


@pytest.mark.parametrize("status", ["fail_accuracy", "compilations_differ"])
def test_what_shows_in_every_run_has_no_rate(status: str) -> None:
    counted = Row("cpu", "net", 1, "eager_two_runs_differ", rate=0.5, trials=4, rate_of="runs")
    assert how_often(counted) == "2 of 4 runs"
    assert how_often(replace(counted, accuracy=status)) == ""


@pytest.mark.parametrize(
    ("more", "replayable"),
    [
        ({"repro": "repro/a"}, True),
        ({}, False),
        ({"repro": "repro/a", "mode": "batch-invariance"}, False),
        ({"repro": "repro/a", "backend": "inductor"}, False),
    ],
)
def test_replay_takes_the_repro_of_an_eager_kernel_alone(more: dict[str, Any], replayable: bool) -> None:
    assert is_replayable(Row("cpu", "a", 1, "fail_accuracy", **more)) is replayable


COMMANDS = {
    "an option and its value": ("train.py --token abc --lr 0.1", "train.py --token *** --lr 0.1"),
    "in one word": ("train.py --api-key=abc", "train.py --api-key=***"),
    "by a part of its name": ("x --wandb_api_key abc --hf-token x", "x --wandb_api_key *** --hf-token ***"),
    "a variable": ("env HF_TOKEN=abc python", "env HF_TOKEN=*** python"),
    "an override": ("train.py +logger.password=abc", "train.py +logger.password=***"),
    "a value of a known shape": ("train.py hf_abcdefghijklmnop", "train.py ***"),
    "the user of a URL": ("train.py s3://me:abc@host/x", "train.py s3://***@host/x"),
    "a flag without a value": ("train.py --auth --lr 1", "train.py --auth --lr 1"),
    "tokens of a text": (same := "train.py --max-tokens 9 --pad-token 0 --tokenizer b", same),
    "keys of a table": (same := "train.py --key name --keys a b --monkey 1", same),
    "an address": (same := "pip install git+https://host/a@main me@host", same),
    "other words": (same := "train.py --secretary x --author y sk-learn", same),
}


@pytest.mark.parametrize(("given", "kept"), COMMANDS.values(), ids=COMMANDS)
def test_secrets_of_a_command_line_are_masked(given: str, kept: str) -> None:
    assert " ".join(masked(given.split())) == kept


def test_a_secret_in_a_header_is_masked() -> None:
    assert masked(["curl", "-H", "Authorization: Bearer abc"]) == ("curl", "-H", "Authorization: Bearer ***")
