"""What a sweep prints at its end, and the commands in it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.catalog import Status, kind_of
from hashbench.cli import _parser
from hashbench.cli.flags import Look, look_of
from hashbench.cli.sweep import command_for, request_of
from hashbench.records import RunOptions
from hashbench.report.table import sweep_table

from .rows import DIFFERING, row

LONG = dict.fromkeys(("kernel", "module", "phase", "origin", "cause", "confidence"), "long_word_" * 6)
REMEDY = "Sort the indices, or call torch.use_deterministic_algorithms(True) and read what it says " * 3


def main_lines(table: str) -> list[str]:
    """The rows of the table itself, without what stands below them."""
    return [line for line in table.split("\n\n")[0].splitlines()[2:] if not line.startswith(" ")]


def test_what_differs_comes_first_then_what_fails_and_the_rest_is_counted():
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


def test_what_was_not_compared_is_said_of_what_passes_and_of_what_does_not():
    rows = [
        row("a", not_compared="output.1: a lock"),
        row("b", compiled="ran eagerly: Net"),
        replace(DIFFERING, not_compared="output.2: a socket"),
    ]
    lines = [line.strip() for line in sweep_table(rows).splitlines()]
    assert "1 pass: not compared: output.1: a lock (a)" in lines
    assert "1 pass: ran eagerly: Net (b)" in lines
    assert "not compared: output.2: a socket" in lines


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
def test_the_table_fits_a_terminal_and_no_status_and_no_remedy_is_cut(width, status):
    odd = row("a_name_of_a_model_that_is_long", status, **LONG, error=REMEDY, advice=REMEDY, seconds=12_345.6)
    table = sweep_table(
        [odd, row("skipped", "pass_due_to_skip", error=REMEDY), row(runs=2, rate_high=0.95)], width=width
    )
    assert max(map(len, table.splitlines())) <= width
    assert f" {status} " in f"{main_lines(table)[0]} "
    assert " ".join(REMEDY.split()) in " ".join(table.split())


def test_columns_are_left_out_before_a_cause_is_cut_and_what_is_left_has_the_room():
    known = {"kernel": "aten.new_empty.default", "module": "Padding", "phase": "forward", "seconds": 6.6}
    differs = row(
        "circular_padding", "eager_two_runs_differ", cause="uninitialized_memory", confidence="proven", **known
    )
    heads = {width: sweep_table([differs], width=width).splitlines()[0].split() for width in (140, 100, 90, 80)}
    assert heads[140] == ["name", "accuracy", "kernel", "module", "phase", "cause", "confidence", "seconds"]
    assert heads[90] == ["name", "accuracy", "kernel", "cause", "seconds"]
    assert "uninitialized_memory" in sweep_table([differs], width=80)
    assert "aten.new_empty.default" in sweep_table([differs], width=100)


def test_nothing_is_cut_where_no_terminal_is():
    odd = row("n" * 99, "crashed", **LONG, error=REMEDY)
    table = sweep_table([odd])
    assert all(text in table for text in ("n" * 99, LONG["kernel"], LONG["module"], REMEDY.strip()))


def test_below_a_row_stand_its_error_the_advice_the_repro_or_log_and_the_command(tmp_path):
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
            "2 equal runs: up to 95 % of further runs may still differ (95 % confidence); --runs 21 bounds that at ",
        ),
        (30, 0.098, "30 equal runs: up to 10 % of further runs may still differ (95 % confidence); --runs 60 bounds "),
        (99, 0.03, "99 equal runs: up to 3 % of further runs may still differ (95 % confidence)."),
    ],
)
def test_what_agreeing_runs_prove_and_what_proves_more(runs, high, said):
    few = row("a", runs=runs, rate_high=high)
    failed = row("c", "crashed", runs=2, rate_high=0.99)
    assert sweep_table([failed, few, row(runs=200, rate_high=0.01)]).splitlines()[-1].startswith(said)
    assert "equal runs" not in sweep_table([failed])
    assert "--runs" not in sweep_table([few], more_runs=False)


def test_colours_tell_kinds_apart_and_change_no_width():
    rows = [DIFFERING, row("dies", "crashed"), row("passes")]
    plain, coloured = sweep_table(rows), sweep_table(rows, colour=True)
    stripped = coloured
    for code in ("31", "32", "33", "0"):
        assert f"\x1b[{code}m" in coloured
        stripped = stripped.replace(f"\x1b[{code}m", "")
    assert stripped == plain


class Stream:
    def __init__(self, terminal):
        self.isatty = lambda: terminal


@pytest.mark.parametrize(
    ("stream", "variables", "look"),
    [
        (Stream(True), {}, Look(77, True)),
        (Stream(True), {"NO_COLOR": "1"}, Look(77, False)),
        (Stream(True), {"TERM": "dumb"}, Look(77, False)),
        (Stream(False), {}, Look(None, False)),
        (Stream(False), {"FORCE_COLOR": "1"}, Look(None, True)),
        (Stream(False), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, Look(None, False)),
        (None, {}, Look(None, False)),
    ],
)
def test_terminals_have_a_width_and_colours_unless_none_are_wanted(monkeypatch, stream, variables, look):
    monkeypatch.setenv("COLUMNS", "77")
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert look_of(stream) == look


# ------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "flags",
    [
        "--training",
        "--inference --amp --batch-size 4 --runs 3 --threads 2 --seed 0 --deterministic off",
        "--training --cotangent random --hash-inputs --untraced-pair --replays 5 --diagnose-budget 7.5 -d cuda",
        "--training --jobs 4 --output elsewhere -k other -x more --total-partitions 2",
    ],
)
def test_the_command_of_a_row_sweeps_its_model_alone_under_the_same_flags(flags):
    asked = _parser().parse_args(["sweep", "--suite", "zoos/my zoo.py", "torchvision", *flags.split()])
    request = request_of(asked, suites=asked.suite, output=Path("out"))
    line = command_for(request, row("a b", "crashed", suite="my zoo", threads=1))
    again = _parser().parse_args(shlex.split(line)[1:])
    made = request_of(again, suites=again.suite, output=Path("out"))
    assert (made.selection.suites, made.selection.only) == (("zoos/my zoo.py",), ("a b",))
    threads = 1 if "--jobs" in flags else request.options.threads
    assert made.options == replace(request.options, threads=threads)


def test_the_command_of_a_row_that_nobody_diagnosed_lets_it_be_diagnosed_and_a_repro_is_replayed():
    asked = _parser().parse_args(["sweep", "--training", "--diagnose-budget", "0"])
    request = request_of(asked, suites=asked.suite, output=Path("out"))
    line = command_for(request, DIFFERING)
    assert "--diagnose-budget" not in line
    assert _parser().parse_args(shlex.split(line)[1:]).diagnose_budget == RunOptions().diagnose_budget
    assert command_for(request, replace(DIFFERING, repro="repro/a b")) == "hashbench replay 'out/repro/a b'"
