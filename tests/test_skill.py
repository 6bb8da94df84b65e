"""``docs/skill.md``: every command and name on it exists, and ten questions are answered with it alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Main

from hashbench import cli
from hashbench.core.catalog import Confidence, Origin, Status
from hashbench.core.report.reasons import Reason
from hashbench.core.results.rows import ROWS
from tests.json_documents import SCHEMA_FILE, Call, calls, documents

PAGE = SCHEMA_FILE.with_name("skill.md")
LONGEST = 120

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def rows_below(title: str) -> list[list[str]]:
    """The cells of the table whose first header is ``title``."""
    lines = page().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {title} |"))
    table = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


QUESTIONS = rows_below("question") if PAGE.exists() else []


def command_of(words: list[str]) -> str:
    """``ranks diff`` of a command line."""
    return cli._parser().chosen(words).removeprefix("hashbench ")


def values_at(value: Any, path: str) -> Iterator[Any]:
    """The values at ``rows[].kernel``; none where a name of it is missing."""
    name, _, rest = path.partition(".")
    if not isinstance(value, dict) or name.removesuffix("[]") not in value:
        return
    found = value[name.removesuffix("[]")]
    for item in found if name.endswith("[]") else [found]:
        if rest:
            yield from values_at(item, rest)
        else:
            yield item


# ------------------------------------------------------------------------------------------------------- the page


def test_it_is_short_and_printed(main: Main, tmp_path: Path) -> None:
    done = main("docs", "skill", cwd=tmp_path)
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, page().rstrip("\n"))
    assert len(page().splitlines()) <= LONGEST


@pytest.mark.parametrize("line", [row[1].strip("`") for row in QUESTIONS])
def test_every_command_asks_for_json_and_every_flag_exists(line: str) -> None:
    _, *words = shlex.split(line)
    assert "--json" in words
    parser = cli._parser()
    for word in words:
        parser = parser.commands.get(word, parser)
    flags = [word for word in words if word.startswith("-") and word != "--"]
    assert [flag for flag in flags if parser.find(flag) is None] == []


@pytest.mark.slow
@pytest.mark.parametrize(("line", "names"), [(row[1].strip("`"), row[2]) for row in QUESTIONS])
def test_every_name_to_read_is_in_documents_of_its_command(line: str, names: str) -> None:
    command = command_of(shlex.split(line)[1:])
    made = [found for found in documents() if found["command"] == f"hashbench {command}"]
    assert made
    columns = {f"rows[].{column}" for column in ROWS.columns} if command == "sweep" else set()
    for path in re.findall("`(.+?)`", names):  # empty columns of rows are left out
        assert path in columns or any(True for found in made for _ in values_at(found, path)), path


@pytest.mark.slow
def test_names_in_the_text_are_in_documents() -> None:
    text = page().partition("## How to read")[2]
    made = [*documents()]
    for path in set(re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+)+|classes\[\]\.\w+)`", text)):
        assert any(True for found in made for _ in values_at(found, path)), path
    words = {"origin": Origin, "confidence": Confidence}
    for title, known in words.items():
        listed = {word for row in rows_below(f"`{title}`") for word in re.findall("`(.+?)`", row[0])}
        assert listed <= set(map(str, known)), title
    assert {str(word) for word in Confidence} == {row[0].strip("`") for row in rows_below("`confidence`")}
    for word in ("pass", "eager_two_runs_differ", "pass_due_to_skip"):
        assert f"`{word}`" in text
        assert word in set(map(str, Status))


def test_classes_are_those_of_compare() -> None:
    assert {row[0].strip("`") for row in rows_below("`classes[].class`")} == set(map(str, Reason))


# ---------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, slots=True)
class Case:
    """A question, what the page says to run, and what follows.

    Attributes:
        question: as on the page.
        call: the input on which its command is run.
        reads: name -> value in the real document.
        kind: which of the page's rules for verdicts applies: ``differs``, ``equal``, ``neither`` or ``error``.
        never: words of the page's last section that forbid the wrong conclusion from this document.
        tempts: text of the document, or a value of it, that tempts to it.
    """

    question: str
    call: str
    reads: Mapping[str, Any]
    kind: str
    never: str = ""
    tempts: str = ""


CASES = (
    Case(
        "Does my script do the same twice?",
        "a program",
        {"divergence.origin": ["outside"], "divergence.source": ["varies.py:14 <module>"], "step": [0]},
        "differs",
        never="The op named with the origin `outside`",
        tempts="kernel",
    ),
    Case(
        "Does my script do the same twice?",
        "a program that repeats",
        {"divergence": [None], "texts": [[]]},
        "equal",
        never='`pass` or `equal` is not "deterministic"',
        tempts="Not compared: standard error",
    ),
    Case(
        "Which models differ from run to run?",
        "a zoo",
        {
            "rows[].name": ["drifting", "steady"],
            "rows[].accuracy": ["eager_two_runs_differ", "pass"],
            "rows[].kernel": ["aten.add.Tensor"],
            "rows[].confidence": [],  # no experiment was asked for: no cause
        },
        "differs",
        never="A sweep runs with `--deterministic on` unless told otherwise",
        tempts="use_deterministic_algorithms(True)",
    ),
    Case(
        "Which models differ from run to run?",
        "a zoo that passes",
        {"counts": [{"pass": 1}]},
        "equal",
        never="two runs miss what shows rarely",
        tempts="up to 95 %",
    ),
    Case(
        "Where do two traces diverge?",
        "two traces",
        {"divergence.origin": ["outside"], "divergence.kernel": ["aten.mul.Tensor"]},
        "differs",
        never="it is where the difference arrived",
        tempts="a non-tensor argument differs",
    ),
    Case("Where do two traces diverge?", "a trace that is not there", {}, "error"),
    Case(
        "Same seed, other loss: since which step?",
        "two loops",
        {"step": [3], "differing[].part": ["gradient", "parameter"], "not_compared": [[]]},
        "differs",
    ),
    Case(
        "Same seed, other loss: since which step?",
        "a loop that was killed",
        {"step": [None], "differing": [[]]},
        "neither",
        never="Not compared is not equal",
        tempts="its run was killed",
    ),
    Case(
        "The same of two recordings?",
        "two runs of ranks",
        {"first[].rank": [1], "first[].kernel": ["aten.mul.Tensor"], "missing": [[]]},
        "differs",
    ),
    Case(
        "Are replicas equal on all ranks?",
        "one run of ranks",
        {"differing": [[]], "checked": [[]]},
        "neither",
        never="Not compared is not equal",
        tempts="nothing was compared",
    ),
    Case(
        "Is a captured kernel the cause, and why?",
        "a captured call",
        {"reproduced": [False], "decision.cause": ["unknown"], "decision.confidence": ["open"]},
        "equal",
        never="Replays that are all equal do not clear a kernel",
        tempts="all replays are equal",
    ),
    Case(
        "What regressed since a baseline?",
        "two nights",
        {"worse": [True]},
        "differs",
        never="`not known` means not known",
        tempts="not known",
    ),
    Case(
        "Which kernels did an upgrade change?",
        "recorded kernels of another machine",
        {"changed[].kernel.op": ["aten.relu.default"], "kernels": [4]},
        "differs",
        never="is not wrong. It computes other bits",
        tempts="max_relative",
    ),
    Case(
        "Is a model the same after a transformation?",
        "another model",
        {"equal_within_tolerance": [False], "equal_bitwise": [False]},
        "differs",
        never="Equal within a tolerance is not equal bit by bit",
        tempts="within",
    ),
    Case(
        "Which stage of a data pipeline differs?",
        "two checks of a pipeline",
        {"first": ["after transform"]},
        "differs",
    ),
)
KINDS = {"differs": (False, True), "equal": (True, False), "neither": (False, False), "error": (None, None)}


def test_there_are_ten_cases_of_ten_questions() -> None:
    assert len({case.question for case in CASES}) >= 10
    assert {case.kind for case in CASES} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.call)
def test_the_page_leads_to_the_right_answer(case: Case) -> None:
    (row,) = [row for row in QUESTIONS if row[0] == case.question]
    call = calls()[case.call]
    assert command_of(shlex.split(row[1].strip("`"))[1:]) == command_of(shlex.split(call.line))
    names = re.findall("`(.+?)`", row[2])
    found = call.document
    for path, values in case.reads.items():
        assert path in names or path.partition(".")[0].partition("[")[0] in " ".join(names), path
        assert [*values_at(found, path)] == values, path
    assert (found.get("equal"), found.get("differs")) == KINDS[case.kind]
    _follow(call, case)


def _follow(call: Call, case: Case) -> None:
    """The rules of the page for this kind of document hold of it, and warn of what it tempts to."""
    if case.kind == "error":
        assert call.document["error"]["tip"]
    elif case.kind == "differs":
        assert call.document["headline"]
    elif case.kind == "neither":
        assert call.document["notes"]
        assert call.code == 2
    if case.never:
        rules = " ".join(page().partition("## What never to conclude")[2].split())
        assert case.never in rules
        assert case.tempts in str(call.document)
