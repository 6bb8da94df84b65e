"""The page of two recordings of a training loop."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from extensions.watch.test_compare import recording

from hashbench.core.finding.page import as_html
from hashbench.extensions.watch.compare import RankVerdict, compare
from hashbench.extensions.watch.page import DIFFERENT, EQUAL, MOST_COLUMNS, figures_of, plot_of
from hashbench.extensions.watch.text import finding_of
from hashbench.extensions.watch.traced import LoopVerdict


def verdict(*ranks: RankVerdict) -> LoopVerdict:
    return LoopVerdict((Path("runs/a"), Path("runs/<b>")), ranks, recordings=(recording("a"), recording("b")))


def page_of(loops: LoopVerdict) -> str:
    return as_html(finding_of(loops), title="hashbench watch diff", of="runs/a and runs/<b>", **figures_of(loops))


DIFFERING = compare(recording("a"), recording("b", {7: {"loss": {"0": "x"}, "gradient": {"d.weight": "y"}}}))


def test_a_strip_has_a_bar_for_each_run_of_steps() -> None:
    plot = plot_of(DIFFERING)
    loss = next(strip for strip in plot.strips if strip.part == "loss")
    assert [(bar.kind, bar.at, bar.width) for bar in loss.bars] == [(EQUAL, 0, 7), (DIFFERENT, 7, 1), (EQUAL, 8, 4)]
    assert [bar.words for bar in loss.bars] == ["steps 0 to 6: agree", "step 7: differ", "steps 8 to 11: agree"]
    assert (plot.columns, plot.mark, plot.first, plot.last) == (12, 7, "step 0", "step 11")


def test_the_state_before_the_first_step_is_the_start() -> None:
    plot = plot_of(replace(DIFFERING, seen={-1: {"parameter": True}, 0: {"parameter": True}}, step=None))
    assert ([bar.words for bar in plot.strips[0].bars], plot.first) == (["start to step 0: agree"], "start")


def test_steps_that_did_not_read_a_part_are_gaps() -> None:
    seen = {number: {"gradient": True} if number % 2 else {} for number in range(6)}
    plot = plot_of(replace(DIFFERING, seen=seen, step=None))
    assert [(bar.at, bar.width) for bar in plot.strips[0].bars] == [(1, 1), (3, 1), (5, 1)]


def test_many_steps_share_columns_and_one_that_differs_shows() -> None:
    seen = {number: {"loss": number != 1234} for number in range(10 * MOST_COLUMNS)}
    plot = plot_of(replace(DIFFERING, seen=seen, steps=tuple(seen), step=1234))
    assert plot.columns == MOST_COLUMNS
    assert [(bar.kind, bar.at, bar.width) for bar in plot.strips[0].bars if bar.kind == DIFFERENT] == [
        (DIFFERENT, 123, 1)
    ]
    assert plot.mark == 123


def test_the_page_tells_the_first_difference_and_loads_nothing() -> None:
    page = page_of(verdict(DIFFERING))
    HTMLParser().feed(page)
    assert '<h1 class="worse">The runs differ from step 7 on: loss</h1>' in page
    assert "runs/&lt;b&gt;" in page
    assert "first difference (step 7)</span>" in page
    assert "HASHBENCH_TRACE_STEP=" in page
    assert not re.search(r"<script|src=|url\(|https?://", page)
    assert "default-src &#39;none&#39;" in page


def test_equal_runs_have_a_calm_page() -> None:
    page = page_of(verdict(compare(recording("a"), recording("b"))))
    assert '<h1 class="calm">The runs agree in steps 0 to 11</h1>' in page
    assert "first-title" not in page


def test_ranks_have_a_plot_each() -> None:
    page = page_of(verdict(replace(DIFFERING, rank=0, step=9), replace(DIFFERING, rank=1)))
    assert "first on rank 1" in page
    assert page.count('<figure class="loop"') == 2
