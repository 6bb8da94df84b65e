"""What is said of two implementations; all texts: ``tests/golden/expected/implementations.txt``."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hashbench.core.finding import as_json
from hashbench.extensions.implementations.pair.finding import finding_of
from hashbench.extensions.implementations.pair.verdict import PairOutcome
from tests.extensions.implementations.pair.verdicts import EPS, VERDICTS


@pytest.mark.parametrize(
    ("name", "equal", "differs"),
    [
        ("equal", True, False),
        ("rounding", True, False),
        ("a mistake", False, True),
        ("not known", False, False),
    ],
)
def test_only_a_mistake_differs_and_what_is_not_known_is_not_equal(name: str, equal: bool, differs: bool) -> None:
    finding = finding_of(VERDICTS[name])
    assert (finding.equal, finding.differs) == (equal, differs)


def test_every_outcome_has_a_verdict() -> None:
    assert {verdict.outcome for verdict in VERDICTS.values()} == set(PairOutcome)


def test_the_first_line_has_both_ops_with_module_and_line() -> None:
    headline = finding_of(VERDICTS["a mistake"], names=("before", "after")).headline
    assert "aten.add.Tensor in layers.1.norm (before, model.py:33) / aten.add.Tensor (after, engine.py:41)" in headline


def test_a_file_whose_path_has_spaces_is_named_whole() -> None:
    place = dataclasses.replace(EPS.a, source="my models/a b.py:7 x + 1")
    parted = dataclasses.replace(EPS, a=place)
    headline = finding_of(dataclasses.replace(VERDICTS["a mistake"], parted=(parted,))).headline
    assert "(a, my models/a b.py:7)" in headline


def test_the_document_has_all_partings_and_numbers_that_json_has() -> None:
    document = json.loads(
        as_json(finding_of(VERDICTS["several mistakes"])), parse_constant=lambda word: pytest.fail(word)
    )
    assert len(document["parted"]) == 8
    assert document["parted"][1]["values"][1] == ["[0, 1, 0]", 0.5, "nan"]
    assert document["parted"][1]["a"]["module"] == "layers.1.norm"
    assert document["weights"]["differences"][0]["kind"] == "changed"
    assert document["outcome"] == "mistake"
    assert document["fallbacks"]["aten._grouped_mm.default"] == 4


def test_values_are_limited_and_that_is_said() -> None:
    finding = finding_of(VERDICTS["a mistake"], limit=1)
    assert finding.table is not None
    assert len(finding.table.rows) == 1
    assert "The table has 1 of 2 values" in str(finding)


def test_weights_that_differ_are_told_beside_equal_results() -> None:
    text = " ".join(str(finding_of(VERDICTS["weights that nothing reads"])).split())
    assert "they differ: layers.1.norm.weight / blocks.1.scale" in text
    assert "Weights differ, and the results of these inputs do not show it." in text
