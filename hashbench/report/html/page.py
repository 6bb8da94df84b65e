"""The report as one HTML file, for a reader who has a minute: what changed, which kernel, why, what to do.

Pure: plain values in, text out. The file needs nothing else and loads nothing: style and script stand in it, and its
content security policy admits these two by their digests alone. Names, errors and whatever else comes from models are
escaped by the template engine, and control characters in them become spaces.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hashbench.catalog import CAUSES, LETTERS, STATUSES, kind_of, letter_of
from hashbench.report.expectations import Judged
from hashbench.report.history import History
from hashbench.report.html.changes import counts_of, expectation_of, groups_of, is_known, present
from hashbench.report.html.excerpts import Excerpt
from hashbench.report.html.models import model_views
from hashbench.report.html.payload import as_script_content, changes_text, first_night_shown, payload_of
from hashbench.report.html.totals import by_kind, course_of, totals_of
from hashbench.text import count, one_line, scope_words, shorten, suite_words

LONGEST_TEXT = 3000
"""Characters of one text of a model's that a page shows."""

CHANGED_NIGHTS = 40
CHANGED_ENTRIES = 40
PROBLEMS = 5


def render_html(
    history: History,
    *,
    judged: Judged | None = None,
    excerpts: Mapping[tuple[str, ...], Excerpt] | None = None,
    title: str = "hashbench",
    now: datetime | None = None,
) -> str:
    """The page. ``judged`` is the last night against what was expected or was there before, ``excerpts`` what
    :func:`~hashbench.report.html.excerpts.read_excerpts` found. The text encodes as UTF-8 whatever the names hold."""
    models = model_views(history, excerpts or {})
    detailed = frozenset(model.index for model in models)
    style, script = _bundled("style.css"), _bundled("report.js")
    first = first_night_shown(history)
    content = {
        "title": title,
        "now": now.strftime("%Y-%m-%d %H:%M") + (f" {now.tzname()}" if now.tzname() else "") if now else "",
        "policy": policy_for(style, script),
        "style": Markup(style),
        "script": Markup(script),
        "payload": as_script_content(payload_of(history, detailed=detailed)),
        "totals": totals_of(history),
        "course": course_of(history.nights),
        "nights": history.nights,
        "first_night": history.nights[first].label if first else "",
        "models": models,
        "detailed": detailed,
        "more_models": sum(model.trouble is not None for model in history.models) - len(models),
    }
    parts = content | _changes_part(history, judged) | _environment_part(history, judged) | _problems_part(history)
    return _environment().get_template("report.html").render(parts)


def _changes_part(history: History, judged: Judged | None) -> dict[str, Any]:
    judgements = judged.judgements if judged else present(history)
    indices = {model.key: index for index, model in enumerate(history.models)}
    return {
        "judged": judged is not None,
        "headline": headline(history, judged),
        "worse": bool(judged and judged.got_worse),
        "lede": _lede(history, judged),
        "nothing": _nothing(history, judged),
        "counts": counts_of(judgements) if judged else (),
        "remarks": judged.remarks if judged else (),
        "news": groups_of(judgements, indices),
        "known": groups_of(judgements, indices, wanted=is_known),
        "expectations": {
            one.key: f"{one.word.capitalize()}: {expectation_of(one)}." for one in judgements if one.expected
        },
    }


def _problems_part(history: History) -> dict[str, Any]:
    problems = [f"{night.label}: {problem}" for night in reversed(history.nights) for problem in night.problems]
    return {"problems": problems[:PROBLEMS], "more_problems": max(0, len(problems) - PROBLEMS)}


# ------------------------------------------------------------------------------------------------- templates


@functools.cache  # compiling the templates takes longer than filling them
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hashbench.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_presentable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "cause_words": {name: cause.meaning for name, cause in CAUSES.items()},
        "status_words": {word: status.meaning for word, status in STATUSES.items()},
        "letters": LETTERS,
        "letter_of": letter_of,
        "kind_of": kind_of,
        "scope_words": scope_words,
        "shorten": shorten,
        "suite_words": suite_words,
    }
    return environment


def _presentable(value: Any) -> Any:
    """What a template shows of a value: a text on one line, without control characters, and of moderate length."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = one_line(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _bundled(name: str) -> str:
    return resources.files("hashbench.report.html").joinpath("templates", name).read_text(encoding="utf-8")


def policy_for(style: str, script: str) -> str:
    """A content security policy under which this style and this script run and nothing else does: no other script, also
    no handler in an attribute, no image, no connection."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    style_digest, script_digest = digests
    return (
        f"default-src 'none'; style-src 'sha256-{style_digest}'; script-src 'sha256-{script_digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


# --------------------------------------------------------------------------------------------------- heading


def headline(history: History, judged: Judged | None) -> str:
    """The answer in a few words."""
    if not history.nights:
        return "No sweep"
    if judged is not None and (judged.got_worse or any(one.base is not None for one in judged.judgements)):
        return _verdict(judged)
    kinds = by_kind(history.nights[-1].counts)
    parts = [f"{kinds[kind]} {kind}{'s' * (kinds[kind] == 1)}" for kind in ("differ", "fail") if kinds[kind]]
    total = count(sum(kinds.values()), "model")
    return f"Of {total}, {' and '.join(parts)}" if parts else f"None of {total} differs or fails"


def _verdict(judged: Judged) -> str:
    worse = sum(one.worse for one in judged.judgements)
    text = f"{count(worse, 'model')} got worse" if worse else "Nothing got worse"
    if judged.problems:
        return f"{text}{', and' if worse else ', but'} the night is not whole"
    return text


def _lede(history: History, judged: Judged | None) -> str:
    if not history.nights:
        return "There is nothing to report."
    last, first, nights = history.nights[-1], history.nights[0], len(history.nights)
    return " · ".join(
        [
            f"{last.label} against {judged.last}" if judged and judged.last else last.label,
            count(len(history.models), "model"),
            count(nights, "night") + (f" since {first.label}" if nights > 1 else ""),
        ]
    )


def _nothing(history: History, judged: Judged | None) -> str:
    if not history.nights:
        return "There is no sweep."
    return "Every model did what it did before." if judged else "Every model that was run passes."


# ----------------------------------------------------------------------------------------------- environment


def _environment_part(history: History, judged: Judged | None) -> dict[str, Any]:
    last = judged.environment if judged else (history.nights[-1].changed if history.nights else ())
    changed = [night for night in reversed(history.nights) if night.changed]
    return {
        "environment": last,
        "environment_text": changes_text(last, limit=4),
        "changed_nights": [
            (night.label, night.changed[:CHANGED_ENTRIES], max(0, len(night.changed) - CHANGED_ENTRIES))
            for night in changed[:CHANGED_NIGHTS]
        ],
        "more_changed_nights": max(0, len(changed) - CHANGED_NIGHTS),
    }
