"""What a sweep prints at its end, and the commands in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.catalog import Status, kind_of
from hashbench.core.report.table import sweep_table, what_passing_means
from tests.core.report.rows import DIFFERING, row

LONG = dict.fromkeys(("kernel", "module", "phase", "origin", "cause", "confidence"), "long_word_" * 5)
REMEDY = "Sort the indices, or call torch.use_deterministic_algorithms(True) and read what it says " * 3


def main_lines(table: str) -> list[str]:
    """The rows of the table itself, without what stands below them."""
    return [line for line in table.split("\n\n")[0].splitlines()[2:] if not line.startswith(" ")]


def test_differences_first_then_failures_then_counts():
    rows = [
        row("skipped", "pass_due_to_skip", error="needs cuda"),
        row("another", "pass_due_to_skip", error="needs cuda"),
        row("passes"),
        row("dies", "crashed", error="killed by SIGSEGV"),
        replace(DIFFERING, name="differs"),
    ]
    table = sweep_table(rows)
    assert [line.split()[0] for line in main_lines(table)] == ["differs", "dies"]
    assert "passes" not in table
    assert "2 pass_due_to_skip: needs cuda (skipped, another)" in table.splitlines()
    assert "5 models in training: 1 eager_two_runs_differ, 1 crashed, 2 pass_due_to_skip, 1 pass" in table.splitlines()


def test_results_not_compared_are_reported():
    rows = [
        row("a", not_compared="output.1: a lock"),
        row("b", compiled="ran eagerly: Net"),
        replace(DIFFERING, not_compared="output.2: a socket"),
    ]
    lines = [line.strip() for line in sweep_table(rows).splitlines()]
    assert "1 pass: not compared: output.1: a lock (a)" in lines
    assert "1 pass: ran eagerly: Net (b)" in lines
    assert "not compared: output.2: a socket" in lines


def test_a_long_text_that_rows_share_is_said_once():
    rows = [replace(DIFFERING, name=name, advice=REMEDY, not_compared="output.1: a lock " * 9) for name in "abc"]
    rows.append(replace(DIFFERING, name="d", advice="Sort."))
    lines = [line.strip() for line in sweep_table([*rows, replace(rows[-1], name="e")]).splitlines()]
    assert lines.count(f"to do: {REMEDY}".strip()) == 1
    assert lines.count("to do: as for a") == 2
    assert sum(line.startswith("not compared: ") for line in lines) == 3
    assert sum(line.endswith("… (as for a)") for line in lines) == 2
    assert lines.count("to do: Sort.") == 2, "a short text is clearer than a reference"


def test_where_all_passes_there_is_no_table():
    assert sweep_table([row("a"), row("b")]) == "2 models in training: 2 pass"


def test_a_sweep_without_rows_has_words_for_it():
    assert sweep_table([]) == "No model was run."


def test_a_cause_stands_in_the_place_of_the_origin():
    header = sweep_table([replace(DIFFERING, cause="write_race", confidence="proven", seconds=2.0)]).splitlines()[0]
    assert header.split()[-3:] == ["cause", "confidence", "seconds"]
    assert "origin" not in header


@pytest.mark.parametrize("width", [60, 80, 100, 140, 250])
@pytest.mark.parametrize("status", [status for status in Status if not kind_of(status).is_fine])
def test_table_fits_and_cuts_no_status_or_remedy(width, status):
    odd = row("a_name_of_a_model_that_is_long", status, **LONG, error=REMEDY, advice=REMEDY, seconds=12_345.6)
    table = sweep_table(
        [odd, row("skipped", "pass_due_to_skip", error=REMEDY), row(runs=2, rate_high=0.95)], width=width
    )
    assert max(map(len, table.splitlines())) <= width
    assert f" {status} " in f"{main_lines(table)[0]} "
    assert " ".join(REMEDY.split()) in " ".join(table.split())


DIFFERS = row(
    "circular_padding",
    "eager_two_runs_differ",
    kernel="aten.new_empty.default",
    module="Padding",
    phase="forward",
    cause="uninitialized_memory",
    confidence="proven",
    seconds=6.6,
    source="zoo.py:18 forward",
)


def test_seconds_confidence_and_phase_go_first():
    heads = {width: sweep_table([DIFFERS], width=width).splitlines()[0].split() for width in (140, 120, 110, 100, 90)}
    assert heads[140] == ["name", "accuracy", "kernel", "module", "phase", "cause", "confidence", "seconds"]
    assert heads[120] == ["name", "accuracy", "kernel", "module", "phase", "cause", "confidence"]
    assert heads[110] == ["name", "accuracy", "kernel", "module", "phase", "cause"]
    assert heads[100] == ["name", "accuracy", "kernel", "module", "cause"]
    assert heads[90] == ["name", "accuracy", "kernel", "cause"]


@pytest.mark.parametrize("width", range(80, 121))
@pytest.mark.parametrize(
    "kernel", ["aten.mm.default", "aten.new_empty.default", "aten._scaled_dot_product_flash_attention_backward.default"]
)
def test_kernel_is_never_cut(kernel, width):
    table = sweep_table([replace(DIFFERS, kernel=kernel), row("dies", "crashed")], width=width)
    assert max(map(len, table.splitlines())) <= width
    assert kernel in table.split()


def test_what_has_no_column_stands_below_its_row():
    long = replace(DIFFERS, kernel="aten._scaled_dot_product_flash_attention_backward.default")
    lines = [line.strip() for line in sweep_table([long], width=80).splitlines()]
    assert lines[3:5] == [f"where: {long.kernel} in Padding,", "zoo.py:18 forward"]
    assert "where: zoo.py:18 forward" in [line.strip() for line in sweep_table([DIFFERS]).splitlines()]
    narrow = replace(DIFFERS, kernel="aten.convolution_backward.default", name="n" * 16)
    assert "    cause: uninitialized_memory (proven)" in sweep_table([narrow], width=80).splitlines()
    assert "cause:" not in sweep_table([DIFFERS], width=120)


def test_nothing_is_cut_where_no_terminal_is():
    odd = row("n" * 99, "crashed", **LONG, error=REMEDY)
    table = sweep_table([odd])
    assert all(text in table for text in ("n" * 99, LONG["kernel"], LONG["module"], REMEDY.strip()))


def test_lines_below_a_row(tmp_path):
    log = tmp_path / "logs" / "torchvision.training.dies.log"
    log.parent.mkdir()
    log.touch()
    differs = replace(DIFFERING, advice="Sort them.", repro="repro/x", reproduced="3 of 3", traces="traces/a traces/b")
    rows = [
        differs,
        row("dies", "crashed", error="killed\nby signal 9"),
        replace(DIFFERING, traces="traces/a traces/b"),
    ]
    table = sweep_table(rows, folder=tmp_path, command=lambda one: f"again {one.name}")
    below = [line.strip() for line in table.split("\n\n")[0].splitlines() if line.startswith(" ")]
    assert below == [
        *("to do: Sort them.", f"repro: {tmp_path / 'repro/x'} (3 of 3)", f"$ again {differs.name}"),
        "to do: let the diagnosis look for the cause, with a --diagnose-budget above 0",
        f"traces: {tmp_path / 'traces/a'} {tmp_path / 'traces/b'}",
        f"$ again {differs.name}",
        *("killed by signal 9", f"to do: {Status.CRASHED.remedy}", f"log: {log}", "$ again dies"),
    ]


@pytest.mark.parametrize(
    ("runs", "high", "said"),
    [
        (
            2,
            0.95,
            "Passed means: two runs were equal. That can miss a difference that shows in up to 95 % of runs (95 % "
            "confidence); `--runs 60` misses none above 5 %, and `--stress` also varies threads, load, memory and "
            "addresses.",
        ),
        (
            30,
            0.098,
            "Passed means: 30 runs were equal. That can miss a difference that shows in up to 9.8 % of runs (95 % "
            "confidence); `--runs 60` misses none above 5 %, and `--stress` also varies threads, load, memory and "
            "addresses.",
        ),
        (
            99,
            0.03,
            "Passed means: 99 runs were equal. That can miss a difference that shows in up to 3 % of runs (95 % "
            "confidence).",
        ),
    ],
)
def test_footer_says_what_passing_means(runs, high, said):
    pytest.importorskip("hashbench.extensions.stress")  # which is suggested
    few = row("a", runs=runs, rate_high=high, deterministic="off")
    failed = row("c", "crashed", runs=2, rate_high=0.99)
    many = row(runs=200, rate_high=0.01, deterministic="off")
    assert sweep_table([failed, few, many]).splitlines()[-1] == said
    assert "Passed means" not in sweep_table([failed])
    assert "--runs" not in sweep_table([few], more_runs=False)
    assert "Passed means" not in sweep_table([few], footer=False)
    assert what_passing_means([failed, few]) == said


BY_FLAG = "ran with torch.use_deterministic_algorithms(True), not with the program's own setting"
AS_TORCH_DOES = "; torch's default is `--deterministic off`"
LEVELS = {
    "all at on": (("on", "on"), f" They {BY_FLAG}{AS_TORCH_DOES}."),
    "one that warns": (("off", "warn"), f" 1 of these 2 models {BY_FLAG}{AS_TORCH_DOES}."),
    "all at off": (("off", "off"), ""),
    "unknown": (("", ""), ""),
}


@pytest.mark.parametrize(("levels", "said"), LEVELS.values(), ids=LEVELS)
def test_footer_says_that_passing_models_did_not_run_with_the_setting_of_the_program(levels, said):
    rows = [row(level, runs=99, rate_high=0.03, deterministic=level) for level in levels]
    missed = "That can miss a difference that shows in up to 3 % of runs (95 % confidence)."
    assert what_passing_means(rows) == f"Passed means: 99 runs were equal. {missed}{said}"
    assert AS_TORCH_DOES not in what_passing_means(rows, more_runs=False)  # under a harness that has no such flag


def test_what_one_build_under_the_flag_does_not_show_is_a_remark():
    lines = sweep_table(
        [
            row("alike", second_build="equal"),
            row("other", second_build="differs in input.0"),
            row("race", deterministic_ops="aten.index_put_.default"),
        ]
    ).splitlines()
    known = "torch documents as deterministic only with --deterministic on: aten.index_put_.default"
    assert lines[:2] == [
        "1 pass: a second build from the same seed: differs in input.0 (other)",
        f"1 pass: {known}; `--deterministic off` looks at them (race)",
    ]
    assert "alike" not in "\n".join(lines)


def test_colours_tell_kinds_apart_and_change_no_width():
    rows = [DIFFERING, row("dies", "crashed"), row("passes")]
    plain, coloured = sweep_table(rows), sweep_table(rows, colour=True)
    stripped = coloured
    for code in ("31", "32", "33", "0"):
        assert f"\x1b[{code}m" in coloured
        stripped = stripped.replace(f"\x1b[{code}m", "")
    assert stripped == plain
