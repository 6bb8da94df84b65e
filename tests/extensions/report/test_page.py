"""The page as text: complete, safe whatever models are called, small however many there are."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import re
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import pytest

from hashbench.core.catalog import CAUSES, STATUSES, letter_of
from hashbench.core.records import Row, RowEvidence
from hashbench.core.report.compare import Became
from hashbench.core.text import how_much, how_often
from hashbench.core.trace import file
from hashbench.extensions.report.diagnoses import DETAILS, anchor_of, read_excerpts
from hashbench.extensions.report.expectations import ExpectationStatus, JudgedNight
from hashbench.extensions.report.history import History, Interval, ModelHistory, Night, Trouble
from hashbench.extensions.report.page import as_script_content, machine_of, render_html
from hashbench.extensions.report.verdict import headline
from tests.core.report.rows import row
from tests.experiment_texts import evidence
from tests.extensions.compiled.compiled_rows import INACCURATE, ROUNDED, WHY
from tests.extensions.report.histories import (
    DIAGNOSED,
    TORCH_CHANGED,
    diagnosed,
    failed,
    history,
    judged,
    passing,
    traces,
)
from tests.extensions.report.judgements import MET_PASS, MOVED, NEW_DIFFERENCE, STALE, changes_of, judgement

HOSTILE = "<img src=x onerror=alert(1)></script><!--\u2028\u202e'\"&{{7*7}}"


def page(*nights: list[Row], **values: object) -> str:
    return render_html(judged(*nights, **values))


def data_of(text: str) -> dict:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(content)


# ------------------------------------------------------------------------------------------------ one file


def test_the_page_names_nothing_outside_itself() -> None:
    text = page([passing(DIAGNOSED)], [DIAGNOSED])
    without = text.replace("http-equiv", "")
    assert not re.findall(r"https?:|src=|@import|url\(|<link", without)


def test_policy_admits_only_own_style_and_script() -> None:
    text = page([DIAGNOSED])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy


def test_no_element_has_a_style_or_a_handler_of_its_own() -> None:
    text = page([passing(DIAGNOSED)], [DIAGNOSED])
    body = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", body)


# ------------------------------------------------------------------------------------------ untrusted texts


TEXTS = ("name", "suite", "kernel", "module", "detail", "because", "advice", "evidence", "error", "source", "repro")


@pytest.mark.parametrize("column", TEXTS)
def test_no_text_of_a_model_becomes_markup(column: str) -> None:
    values = [evidence(f"call/repeat ({HOSTILE})", f"call/one_thread 1/2 [{HOSTILE}]"), RowEvidence(HOSTILE)]
    for value in values if column == "evidence" else [HOSTILE]:
        bad = dataclasses.replace(DIAGNOSED, **{column: value})
        _is_harmless(page([passing(bad)], [bad]))


def _is_harmless(text: str) -> None:
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "<!--" not in text


def test_names_of_nights_and_environments_are_escaped() -> None:
    changed = (dataclasses.replace(TORCH_CHANGED[0], key=HOSTILE, base=HOSTILE, new=HOSTILE),)
    found = history([DIAGNOSED], [DIAGNOSED], changed={1: changed}, problems=(HOSTILE,))
    nights = tuple(dataclasses.replace(night, label=HOSTILE) for night in found.nights)
    text = render_html(JudgedNight(dataclasses.replace(found, nights=nights), (), before=0), title=HOSTILE)
    assert "<img" not in text
    assert text.count("</script>") == 2


def test_text_inside_the_script_reads_back_as_it_was() -> None:
    content = as_script_content({"name": HOSTILE})
    assert not set("<>&\u2028") & set(content)
    assert json.loads(content) == {"name": HOSTILE}


def test_control_characters_are_shown_as_text() -> None:
    bad = diagnosed("a\x00b\x1bc\ud800d")
    text = page([bad])
    text.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert "a b c\\ud800d" in text


def test_an_endless_error_is_cut() -> None:
    assert len(page([failed("a", error="x" * 1_000_000)])) < 200_000


# ------------------------------------------------------------------------------------------------ what it says


UNRECORDED = "(not known: what changed is not recorded, died with signal 9)"
mine = functools.partial(diagnosed, suite="torchvision")


@pytest.mark.parametrize(
    ("nights", "words"),
    [
        (
            [[row("a")], [mine("a")]],
            "1 model got worse: a (not known: what changed is not recorded, aten.index_put.default)",
        ),
        ([[row("a"), row("b")], [failed("a"), failed("b")]], f"2 models got worse: a, b {UNRECORDED}"),
        ([[row(n) for n in "abc"], [failed(n) for n in "abc"]], f"3 models got worse: a, b, c {UNRECORDED}"),
        (
            [[row(n) for n in "abcd"], [failed(n) for n in "abcd"]],
            f"4 models got worse: a, b, c and 1 more {UNRECORDED}",
        ),
        ([[row("a")], [row("a")]], "Nothing got worse"),
        ([[failed("a")], [row("a")]], "Nothing got worse"),
        ([[DIAGNOSED, row("a")]], "Of 2 models, message_passing differs"),
        ([[DIAGNOSED, failed("b"), row("c")]], "Of 3 models, message_passing differs, b fails"),
        ([[row("c")]], "None of 1 model differs or fails: 1 passes"),
        ([[row("c", "timeout"), row("c", mode="inference")]], "Of 2 rows of 1 model, c fails"),
        ([[failed(n) for n in "abcd"]], "Of 4 models, 4 fail"),
        (
            [[row("a"), mine("b", deterministic="off")], [row("a"), row("b", deterministic="on"), mine("c")]],
            "c is new and differs; nothing got worse",
        ),
        ([[row("a", threads=2)], [mine("a", threads=7)]], "Whether a got worse is not known: threads 2 → 7"),
        (
            [[row("a"), row("b", threads=2)], [failed("a"), mine("b", threads=7)]],
            f"1 model got worse: a {UNRECORDED}; whether b got worse is not known: threads 2 → 7",
        ),
        (
            [[row("a")], [failed("a"), row("b")]],
            f"1 model got worse: a {UNRECORDED}; 1 row had nothing to compare with: 1 passes",
        ),
    ],
)
def test_the_headline_is(nights: list[list[Row]], words: str) -> None:
    assert headline(judged(*nights)) == words


def test_headline_says_that_a_night_is_not_whole() -> None:
    night = judged([row("a")], [row("a")], problems=("a CSV is cut off",))
    assert headline(night) == "Nothing got worse, but the night is not whole: a CSV is cut off"


def test_the_time_of_making_is_told() -> None:
    now = datetime(2026, 11, 20, 6, 30, tzinfo=UTC)
    assert "Made on 2026-11-20 06:30 UTC" in render_html(judged([row("a")]), now=now)


def test_diagnosis_has_evidence_traces_repro_history(tmp_path: Path) -> None:
    for number, trace in enumerate(traces(), start=1):
        file.write(trace, tmp_path / "specimens_training" / "traces" / f"one.run{number}.log")
    night = judged([passing(DIAGNOSED)], [DIAGNOSED], folder=tmp_path)
    text = render_html(night, excerpts=read_excerpts(night.history))
    body = text[text.index('<section id="models"') :]
    for words in (
        "with one thread",
        "33 of 33",
        "✓ gone",
        "the outcome differs in place",
        "float32[4]:aaaa000000000000",
        "float32[4]:cccc000000000000",
        "Where in the model",
        str(tmp_path / "specimens_training" / DIAGNOSED.repro),
        "deterministic under the flag",
        "2026-11-01",
    ):
        assert words in body, words


def test_recovered_model_keeps_its_diagnosis() -> None:
    text = page([DIAGNOSED], [passing(DIAGNOSED)])
    assert "It is a pass now" in text
    assert "until 2026-11-01" in text


# ----------------------------------------------------------------------------------------------------- facts


def test_a_rate_is_told_with_its_bounds() -> None:
    assert how_often(DIAGNOSED) == "33 of 33 replays (95 % interval: 91 % to 100 %), 34 different outcomes"
    assert how_often(row("a")) == ""


def test_a_size_is_told_in_what_is_known_of_it() -> None:
    assert how_much(DIAGNOSED) == "101\u202f169 elements, at most 3.5e-07 apart"
    assert how_much(row("a")) == ""


def test_large_history_fits_into_one_page() -> None:
    intervals = (Interval(0, 499, "pass"), Interval(500, 520, "eager_two_runs_differ", "aten.cumsum.default", "rng"))
    quiet = (Interval(0, 999, "pass"),)
    found = History(
        tuple(Night(f"2026-{n:04}", counts={"pass": 10_000, "timeout": n % 7}) for n in range(1000)),
        tuple(
            ModelHistory(
                ("suite", "training", "float32", "cpu", f"model_{m:05}_{'x' * 30}"),
                intervals if m % 10 == 0 else quiet,
                None,
                Trouble(diagnosed("x" * 40), 520) if m % 10 == 0 else None,
            )
            for m in range(10_000)
        ),
    )
    text = render_html(JudgedNight(found, ()))
    assert len(text.encode()) < 5_000_000
    assert len(data_of(text)["models"]) == 10_000
    assert f"{1000 - DETAILS} older ones have no room here" in text


def test_a_moved_difference_says_from_where_to_where() -> None:
    assert "kernel x → y" in changes_of(MOVED)


@pytest.mark.parametrize("link", ["https://example.org/1", "javascript:alert(1)"])
def test_only_web_addresses_become_links(link: str) -> None:
    text = changes_of(dataclasses.replace(STALE, link=link))
    assert (f'<a href="{link}"' in text, link in text) == (link.startswith("https"),) * 2


def test_members_point_to_their_model_in_the_history() -> None:
    assert '<li data-model="0">' in changes_of(NEW_DIFFERENCE)
    assert '<li data-model="-1">' in changes_of(
        judgement(ExpectationStatus.BROKEN, Became.REGRESSED, None, failed("b"))
    )


def test_counts_are_in_the_order_of_the_judgements() -> None:
    text = changes_of(MOVED, MOVED, MET_PASS)
    assert text.index('<span class="is-worse"><b>2</b> moved</span>') < text.index(
        "<span><b>1</b> as last night</span>"
    )


# ---------------------------------------------------------------------------------------------------- words


def test_every_cause_and_standing_has_a_sentence() -> None:
    assert all(cause.meaning.endswith(".") for cause in CAUSES.values())
    assert all(status.meaning.endswith(".") for status in ExpectationStatus)


@pytest.mark.parametrize(
    ("status", "letter"),
    [
        ("pass", "P"),
        ("eager_two_runs_differ", "D"),
        ("pass_due_to_skip", "S"),
        ("eager_1st_run_OOM", "M"),
        ("timeout", "T"),
        ("crashed", "C"),
        ("model_fail_to_load", "F"),
        ("a word of dynamo's", "F"),
        ("", ""),
    ],
)
def test_letters_of(status: str, letter: str) -> None:
    assert letter_of(status) == letter


def test_every_status_has_a_sentence() -> None:
    assert all(status.meaning for status in STATUSES.values())


# ---------------------------------------------------------------------------------- addresses, machine, measured


def test_address_of_a_model_is_stable() -> None:
    first = page([failed("b"), failed("d")])
    then = page([failed("a"), failed("b"), diagnosed("c"), failed("d")])
    anchors = re.findall(r'class="lead" id="([^"]+)"', first)
    assert anchors == ["torchvision.training-float32-cpu.b", "torchvision.training-float32-cpu.d"]
    assert set(anchors) < set(re.findall(r'class="lead" id="([^"]+)"', then))


def test_addresses_of_hostile_names_are_safe() -> None:
    names = ["a b", "a_b", HOSTILE, "a=b", "ä", "#", ""]
    anchors = {anchor_of(("zoos/my zoo.py", "training", 'x"y', "cuda:0", name)) for name in names}
    assert len(anchors) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.~-]+", anchor) for anchor in anchors)


def test_what_differs_stands_before_totals() -> None:
    alone, compared = page([failed("a")]), page([row("a")], [failed("a")])
    assert (">What differs</h2>" in alone, ">What changed</h2>" in compared) == (True, True)
    for text in (alone, compared):
        assert text.index('id="totals"') > text.index('id="changes"') > text.index("<h1")


def test_the_sentence_links_to_the_models() -> None:
    text = page([row("a")], [mine("a")])
    (line,) = re.findall(r'<p class="lede reason">(.*)</p>', text)
    (anchor,) = re.findall(r'href="#([^"]+)"><bdi>a<', line)
    assert f'id="{anchor}"' in text
    assert line.startswith("<b>not known</b> what changed is not recorded: ")
    assert "This would tell: <code>hashbench sweep --suite torchvision --training --runs 60 --only a " in line


@pytest.mark.parametrize("number", [1, 2, 3])
def test_charts_are_drawn_from_three_nights_on(number: int) -> None:
    text = page(*[[mine("a", seconds=2.0)]] * number)
    drawn = number > 2
    assert ('class="strip"' in text, 'class="spark"' in text) == (drawn, drawn)
    assert ('<section id="nights" aria-labelledby="nights-title">' in text, 'href="#nights"' in text) == (drawn, drawn)


def test_rows_and_models_are_counted_apart() -> None:
    text = page([failed("a"), row("a", mode="inference"), row("b")])
    assert "3 rows of 2 models · 1 night" in text


def part_of(text: str, name: str) -> str:
    """The section of a page with that id."""
    return text[text.index(f'<section id="{name}"') :].partition("</section>")[0]


def test_totals_are_given_once() -> None:
    text = part_of(
        page([failed("a", "timeout"), failed("b"), row("c")], [failed("a"), failed("b"), row("c")]), "totals"
    )
    assert re.findall(r"<b>(\d+)</b> <span>(\w+)", text) == [
        ("0", "differ"),
        ("2", "fail"),
        ("0", "skipped"),
        ("1", "pass"),
    ]
    assert re.findall(r'<span class="status">(\w+)</span>', text) == ["timeout", "crashed"]


def test_suites_are_stacked_bars() -> None:
    text = part_of(page([failed("a"), row("b"), row("c"), diagnosed("d")]), "totals")
    bars = re.findall(r'<svg class="share".*?</svg>', text)
    assert [re.findall(r'class="k-(\w+)" x="(\d+)" width="(\d+)"', bar) for bar in bars] == [
        [("differ", "0", "1")],
        [("fail", "0", "1"), ("pass", "1", "2")],
    ]
    assert "1 fail · 2 pass" in text


def test_nothing_moved_no_arrow() -> None:
    known = page([failed("a"), row("b")], [failed("a"), row("b")])
    body = re.sub(r"<(script|style).*?</\1>", "", known, flags=re.DOTALL)
    assert not re.search("[▲→±]|▼", body)
    assert "▲ 1" in part_of(page([row("a")], [failed("a")]), "totals")
    assert "▼ 1" in part_of(page([row("a")], [failed("a")]), "totals")


@pytest.mark.parametrize("changed", [{}, {1: TORCH_CHANGED}], ids=["same machine", "changed machine"])
def test_machine_is_at_the_foot_unless_changed(changed: dict) -> None:
    night = judged([row("a")], [row("a")], changed=changed)
    machine = {"e": {"packages": {"torch": "2.15.0"}}}
    nights = tuple(dataclasses.replace(one, environments=machine) for one in night.history.nights)
    text = render_html(dataclasses.replace(night, history=dataclasses.replace(night.history, nights=nights)))
    assert text.count("torch <b>2.15.0</b>") == 1
    assert (text.index("torch <b>2.15.0</b>") < text.index("<main>")) == bool(changed)


def test_a_diagnosis_is_shown_once() -> None:
    models = part_of(page([DIAGNOSED, failed("b")]), "models")
    assert "<table" not in models.partition("<details class=")[0]
    assert models.count('<details class="model') == 2
    assert models.count('<bdi class="name">message_passing</bdi>') == 1


def test_source_and_evidence_precede_commands() -> None:
    one = dataclasses.replace(DIAGNOSED, source="zoo.py:18 forward")
    models = part_of(page([one]), "models")
    order = [
        models.index(words) for words in ("zoo.py:18 forward", "Evidence: how often", "repro.py", "hashbench sweep")
    ]
    assert order == sorted(order)
    assert models.count("zoo.py:18 forward") == 1


@pytest.mark.parametrize("bad", [diagnosed("a", source="zoo.py:18 forward"), failed("a", source="zoo.py:18 forward")])
def test_a_card_names_the_source_line(bad: Row) -> None:
    assert part_of(page([passing(bad)], [bad]), "changes").count("<code>zoo.py:18 forward</code>") == 1


def test_a_broken_card_has_the_whole_command() -> None:
    words = ["hashbench", "sweep", "--suite", "timm", "zoos/torchvision.py", "--training", "--runs", "5"]
    words += ["--jobs", "4", "--only", "other", "--output", "results/x", "--tiny"]
    night = judged([row("a")], [failed("a")])
    nights = tuple(
        dataclasses.replace(one, environments={"e1": {"command_line": words}}) for one in night.history.nights
    )
    text = render_html(dataclasses.replace(night, history=dataclasses.replace(night.history, nights=nights)))
    command = "hashbench sweep --suite zoos/torchvision.py --training --tiny --runs 5 --only a --output again/a"
    assert part_of(text, "changes").count(f"<code>{command}</code>") == 1
    assert "--only NAME" not in text


def test_assets_are_inlined_whole() -> None:
    text = page([DIAGNOSED])
    shared, own = "hashbench.core.finding", "hashbench.extensions.report"
    for package, name, tag in ((shared, "style.css", "style"), (own, "report.js", "script")):
        content = resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")
        assert f"<{tag}>{content}</{tag}>" in text


def test_what_the_night_ran_on_is_told() -> None:
    machine = {
        "packages": {"torch": "2.15.0", "hashbench": "0.1.0"},
        "torch": {"git": "d0f2af8b66b20da4baa5", "cpu_capability": "AVX512"},
        "cpu": {"model": "EPYC <1>", "cores": 2},
        "threads": {"intra_op": 2},
    }
    other = {**machine, "threads": {"intra_op": 4}}
    assert machine_of(Night("x", environments={"a": machine, "b": other})) == [
        ("torch", "2.15.0, d0f2af8b66b2"),
        ("CPU", "EPYC <1>, AVX512"),
        ("cores", "2"),
        ("threads", "2 or 4"),
        ("hashbench", "0.1.0"),
    ]
    assert machine_of(Night("x")) == []


def test_the_course_of_a_model_is_drawn_in_its_diagnosis() -> None:
    nights = [[dataclasses.replace(DIAGNOSED, seconds=seconds, peak_memory_mib=900.0)] for seconds in (1.0, 4.0, 2.0)]
    text = page(*nights)
    assert "Seconds <b>2</b> s" in text
    assert "Memory <b>900</b> MiB" in text
    assert "How often it differs <b>1</b>" in text
    assert '<path d="M0 75H133V0H267V50H400"/>' in text


def test_a_compiled_model_has_stage_op_and_what_was_measured() -> None:
    text = page([dataclasses.replace(INACCURATE, name="wrong"), dataclasses.replace(ROUNDED, name="rounds")])
    words = re.sub(r"<[^>]*>", "", text)
    assert "cpp_fused_relu_0 (aten.relu.default) in Net.act" in words
    assert WHY in words
    assert (
        "inductor: 1 graph, 0 graph breaks, compiled in 7.8 s; 16 kernel calls, 90 % of their buffers checked" in words
    )
    assert "No kernel is to blame" in words
    assert "The model compiled anew, with one change each" in words
    assert "✓ gone" in words
    assert "0 of 1 run" not in words
    assert "hashbench diff" not in words
    assert "--backend inductor" in words
    assert "two runs differ (A inaccurate)" in words
