"""Excerpts of two traces, with real trace files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hashbench.records import Row, Trace
from hashbench.report.history import History
from hashbench.report.html.excerpts import Excerpt, excerpt_of, module_tree, read_excerpts
from hashbench.trace import file as tracefile
from tests.report.histories import DIAGNOSED, diagnosed, history, record, traces


def written(folder: Path, pair: tuple[Trace, Trace] | None = None) -> Path:
    for number, trace in enumerate(pair or traces(), start=1):
        tracefile.write(trace, folder / "traces" / f"one.run{number}.log")
    return folder


def read_of(night: Path, row: Row = DIAGNOSED) -> Excerpt:
    return next(iter(read_excerpts(history([row], folder=night)).values()))


def test_steps_stand_side_by_side_around_the_divergence() -> None:
    found = excerpt_of(*traces(), DIAGNOSED)
    assert [(step.op, step.same, step.here) for step in found.steps] == [
        ("aten.mm.default", True, False),
        ("aten.tanh.default", True, False),
        ("aten.index_put.default", False, True),
        ("aten.sum.default", False, False),
    ]
    put = found.steps[2]
    assert put.first is not None
    assert put.second is not None
    assert [token.differs for token in put.first.reads] == [False]
    assert [token.text for token in put.first.writes] == ["float32[4]:aaaa000000000000"]
    assert [(token.text, token.differs) for token in put.second.writes] == [("float32[4]:cccc000000000000", True)]


def test_what_reads_a_difference_shows_it() -> None:
    last = excerpt_of(*traces(), DIAGNOSED).steps[-1]
    assert last.first is not None
    assert [(token.text, token.differs) for token in last.first.reads] == [
        ("0 ← aten.index_put.default#0 aaaa0000", True)
    ]


def test_a_step_that_only_one_run_has_stands_alone() -> None:
    first, second = traces()
    shorter = dataclasses.replace(second, records=second.records[:2])
    found = excerpt_of(first, shorter, DIAGNOSED)
    assert [(step.first is None, step.second is None) for step in found.steps] == [
        (False, False),
        (False, False),
        (False, True),
        (False, True),
    ]
    assert found.steps[2].here
    assert not any(token.differs for token in found.steps[2].first.writes)  # there is nothing to differ from


def test_context_limits_the_steps_and_not_the_total() -> None:
    found = excerpt_of(*traces(), DIAGNOSED, context=0)
    assert (len(found.steps), found.total) == (1, 4)


def test_the_module_tree_counts_what_ran_and_what_differs() -> None:
    tree = excerpt_of(*traces(), DIAGNOSED).tree
    assert [(branch.depth, branch.name, branch.steps, branch.differing, branch.here) for branch in tree] == [
        (0, "Net", 4, 2, False),
        (1, "encode", 2, 0, False),
        (1, "gather", 1, 1, True),
        (1, "update", 1, 1, False),
    ]


def test_far_siblings_are_folded_into_one_line_each_side() -> None:
    records = [record(f"aten.op{n}.default", module=f"Net.layer{n}", value=f"{n}") for n in range(30)]
    trace = Trace(tuple(records))
    row = diagnosed("big", op_index=15, kernel="aten.op15.default", module="Net.layer15")
    tree = excerpt_of(trace, trace, row).tree
    assert [(branch.name, branch.folded) for branch in tree if branch.folded] == [("", 11), ("", 10)]
    assert [branch.name for branch in tree if branch.here] == ["layer15"]
    assert len(tree) == 1 + 9 + 2


def test_a_tree_without_modules_is_empty() -> None:
    assert module_tree((), "") == ()


@pytest.mark.parametrize("inside", ["", "specimens_training", "anything"])
def test_traces_are_found_in_the_night_or_in_one_of_its_sweeps(inside: str, tmp_path: Path) -> None:
    folder = written(tmp_path / inside)
    found = read_of(tmp_path)
    assert found.missing == ""
    assert found.folder == str(folder)


def test_the_folder_of_the_right_suite_and_mode_comes_first(tmp_path: Path) -> None:
    written(tmp_path / "another_training")
    right = written(tmp_path / "specimens_training")
    assert read_of(tmp_path).folder == str(right)


def test_traces_that_are_gone_are_said_to_be(tmp_path: Path) -> None:
    assert "not in the sweep's folder" in read_of(tmp_path).missing
    assert "not in the sweep's folder" in read_of(tmp_path / "no night").missing


def test_a_path_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path)
    night = tmp_path / "night"
    night.mkdir()
    row = diagnosed("sly", traces="../traces/one.run1.log ../traces/one.run2.log")
    assert "not in the sweep's folder" in read_of(night, row).missing


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path / "elsewhere")
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "traces").symlink_to(tmp_path / "elsewhere" / "traces")
    assert "not in the sweep's folder" in read_of(tmp_path / "night").missing


def test_a_damaged_trace_is_said_to_be(tmp_path: Path) -> None:
    file = written(tmp_path) / "traces" / "one.run2.log"
    file.write_text(file.read_text()[:-30])
    assert "truncated" in read_of(tmp_path).missing


def test_traces_of_other_runs_are_not_shown(tmp_path: Path) -> None:
    written(tmp_path)
    assert "of other runs" in read_of(tmp_path, diagnosed("other", kernel="aten.cumsum.default")).missing


def test_without_an_op_there_is_no_place_to_show(tmp_path: Path) -> None:
    written(tmp_path)
    assert "entered at no op" in read_of(tmp_path, diagnosed("early", op_index=None)).missing


def many(folder: Path) -> History:
    return history([diagnosed(f"m{n}") for n in range(5)], folder=written(folder))


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    found = many(tmp_path)
    assert len(read_excerpts(found, limit=2)) == 2
    size = sum(file.stat().st_size for file in (tmp_path / "traces").iterdir()) / 2**20
    missing = [excerpt.missing for excerpt in read_excerpts(found, mib=2.5 * size).values()]
    assert missing[:2] == ["", ""]
    assert all("too large" in words for words in missing[2:])
    assert len(missing) == 5


def test_a_night_that_cannot_be_listed_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refused)
    assert "Permission denied" in read_of(tmp_path).missing
