"""Render the report as one HTML file: what changed, which kernel, why, what to do.

Pure: plain values in, text out; :mod:`hashbench.core.finding.page` has what all pages share.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from jinja2 import Environment
from markupsafe import Markup

from hashbench.core.catalog import CAUSES, LETTERS, REPEATED, kind_of, letter_of, status_of
from hashbench.core.extensions import blamed, facts_of, mechanism, rate_of, remedy, words_for
from hashbench.core.finding import page as pages
from hashbench.core.finding.page import bundled, policy_for
from hashbench.core.records import Row, is_link, value_of
from hashbench.core.report.again import sweep_again
from hashbench.core.report.compare import merged
from hashbench.core.results.rows import ROWS
from hashbench.core.text import (
    deterministic_here,
    how_much,
    how_often,
    one_line,
    printable,
    scope_words,
    shorten,
    spaced,
    suite_words,
    when,
)
from hashbench.extensions.report.charts import (
    KIND_WORDS,
    MEASURES,
    changes_text,
    course_of,
    first_night_shown,
    measured_of,
    payload_of,
    sparkline,
    totals_of,
)
from hashbench.extensions.report.diagnoses import Excerpt, anchor_of, model_views
from hashbench.extensions.report.expectations import JudgedNight, rows_of_models
from hashbench.extensions.report.groups import Group, expectation_of, groups_of, is_known, is_news
from hashbench.extensions.report.history import Night
from hashbench.extensions.report.verdict import headline


def render_html(
    judged: JudgedNight,
    *,
    excerpts: Mapping[tuple[str, ...], Excerpt] | None = None,
    tracebacks: Mapping[tuple[str, ...], str] | None = None,
    title: str = "hashbench",
    now: datetime | None = None,
) -> str:
    """Render the page.

    Args:
        judged: the last night, judged.
        excerpts: see :func:`~hashbench.extensions.report.diagnoses.read_excerpts`.
        tracebacks: see :func:`~hashbench.extensions.report.diagnoses.read_tracebacks`.
        title: the page's title; the headline precedes it in the browser's tab.
        now: the time of making, shown in the footer.

    Returns:
        Text that encodes as UTF-8 whatever the names hold.
    """
    history, judgements = judged.history, judged.judgements
    models = model_views(history, excerpts or {}, tracebacks)
    detailed = frozenset(model.index for model in models)
    style, script = bundled("style.css"), bundled("report.js", HOME)
    return printable(
        environment()
        .get_template("report.html")
        .render(
            judged=judged,
            nights=history.nights,
            title=title,
            headline=headline(judged),
            machine=machine_of(judged.night),
            command_of=lambda group: _command_of(group, judged.night),
            size=rows_of_models([judgement for judgement in judged.judgements if judgement.new is not None]),
            now=now.strftime("%Y-%m-%d %H:%M") + (f" {now.tzname()}" if now.tzname() else "") if now else "",
            policy=policy_for(style, script),
            style=Markup(style),
            script=Markup(script),
            payload=as_script_content(payload_of(history, detailed=detailed)),
            # what changed
            counts=Counter((judgement.word, judgement.worse) for judgement in judgements),
            news=groups_of(filter(is_news, judgements)),
            known=groups_of(filter(is_known, judgements)),
            indices={model.key: index for index, model in enumerate(history.models)},
            expectations={judgement.key: judgement for judgement in judgements if judgement.expected},
            problems=[f"{night.label}: {problem}" for night in reversed(history.nights) for problem in night.problems],
            # how many, and over time
            totals=totals_of(history),
            course=course_of(history.nights),
            measured=[
                (label, sparkline(values, nights=len(history.nights)), unit)
                for label, unit, values in (
                    ("Seconds of all models, with diagnosis", "seconds", measured_of(history, "seconds")),
                    ("Largest memory of a model", "MiB", measured_of(history, "memory_mib")),
                )
            ],
            first_night=first_night_shown(history),
            changed_nights=[night for night in reversed(history.nights) if night.changed],
            # model by model
            models=models,
            detailed=detailed,
            more_models=sum(model.trouble is not None for model in history.models) - len(models),
        )
    )


HOME = "hashbench.extensions.report"
"""The package that has the report's templates."""


@functools.cache  # compiling the templates takes longer than filling them
def environment() -> Environment:
    """Return the template engine with what the report's templates use."""
    made = pages.environment(HOME)
    of_rows = (deterministic_here, expectation_of, how_much, how_often, is_link, kind_of, letter_of, status_of, when)
    of_extensions = (blamed, facts_of, mechanism, remedy, tells, why)
    of_names = (anchor_of, changes_text, rows_of_models, scope_words, shorten, spaced, sparkline, suite_words)
    made.globals |= {function.__name__: function for function in (*of_rows, *of_extensions, *of_names)}
    made.globals |= {"value_of": value_of, "labelled": _labelled, "rate_words": rate_of}
    made.globals |= {"causes": CAUSES, "kind_words": KIND_WORDS, "letters": LETTERS}
    made.globals |= {"measures": MEASURES, "repeated": REPEATED}
    return made


def tells(row: Row) -> bool:
    """Return True if an extension describes a row that does not pass."""
    return words_for(row) is not None


def why(row: Row) -> str:
    """Return what was measured, in the words of the extension that describes a row; empty if none does."""
    words = words_for(row)
    return "" if words is None else words.why(row)


def _labelled(row: Row) -> list[tuple[str, str]]:
    return [(column.label, value_of(row, name)) for name, (_, _, column) in ROWS.columns.items() if column.label]


def _command_of(group: Group, night: Night) -> str:
    """Return the command line that reruns the models of a broken group, "" for other groups."""
    names = group.runs_again
    return shlex.join(sweep_again(group.row, night.environments, names=names)) if names else ""


_MACHINE = {
    "torch": ("packages.torch", "torch.git"),
    "CPU": ("cpu.model", "torch.cpu_capability"),
    "cores": ("cpu.cores",),
    "threads": ("threads.intra_op",),
    "device": ("device.name",),
    "Python": ("python",),
    "hashbench": ("packages.hashbench",),
    "tracer": ("tracer",),
}
"""The facts of the environment shown in one line: label to entries of the environment."""


def machine_of(night: Night) -> list[tuple[str, str]]:
    """Return the machine of a night as labels and texts: torch and its commit, CPU, threads.

    Where sweeps of a night ran in several environments, a text has all values; entries unknown to all are left out.
    """
    entries = merged(night.environments.values())
    entries["torch.git"] = " or ".join(text[:12] for text in entries.get("torch.git", "").split(" or "))
    entries_by_label = ((label, [entries[key] for key in keys if entries.get(key)]) for label, keys in _MACHINE.items())
    return [(label, shorten(one_line(", ".join(texts)), 120)) for label, texts in entries_by_label if texts]


def as_script_content(content: object) -> Markup:
    """Encode JSON for ``<script>``: no text in it ends the element, begins a comment or breaks a line (U+2028, U+2029:
    the JSON is ASCII)."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)
