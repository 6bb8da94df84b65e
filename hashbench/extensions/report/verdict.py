"""The verdict on a night in one sentence, and as a finding for a terminal. Pure: plain values in and out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hashbench.core.catalog import kind_of
from hashbench.core.finding import Finding
from hashbench.core.records import ROW_KEY
from hashbench.core.report.compare import VERBS, named, new_in_words
from hashbench.core.report.sentence import changes_in_words, data_of, facts_of, next_of, notes_of, sentence
from hashbench.core.text import join_limited, one_line
from hashbench.extensions.report.expectations import ExpectationStatus, JudgedNight, Judgement, counted, rows_of_models

_PROBLEMS = 2
"""Problems of a night that a sentence names."""


def headline(judged: JudgedNight) -> str:
    """Return the verdict in a sentence: which models got worse and why or, of a night alone, what differs and fails."""
    text = _found(judged) if judged.alone else _compared(judged)
    if judged.night.problems:
        but = "but" if text.lower().endswith("nothing got worse") else "and"
        problems = [problem.rstrip(".") for problem in judged.night.problems]
        text += f", {but} the night is not whole: {join_limited(problems, _PROBLEMS)}"
    return one_line(text if judged.alone else text + judged.not_compared)


def _compared(judged: JudgedNight) -> str:
    new = new_in_words(judged.new_trouble)
    if judged.clauses:
        return sentence(judged.clauses, new=new)
    return f"{new}; nothing got worse" if new else "Nothing got worse"


def _found(judged: JudgedNight) -> str:
    """Summarise a night alone: ``Of 3 models, a and b differ, c fails``, or counts where there are more names."""
    rows = [judgement for judgement in judged.judgements if judgement.new is not None]
    trouble = [judgement for judgement in rows if judgement.in_trouble]
    if not trouble or not named(trouble):
        return counted(judged.judgements)
    parts = []
    for kind, verbs in VERBS.items():
        if same := [judgement for judgement in trouble if kind_of(judgement.now) is kind]:
            parts.append(f"{named(same)} {verbs[len({judgement.key[-1] for judgement in same}) > 1]}")
    return f"Of {rows_of_models(rows)}, {', '.join(parts)}"


def finding_of(
    judged: JudgedNight, *, commands: Sequence[str] = (), reports: Sequence[str] = (), meaning: str = ""
) -> Finding:
    """Return the verdict on a night for a terminal, and with all its models as data.

    Args:
        judged: the night.
        commands: to run next where no model got worse.
        reports: paths of the reports that were written.
        meaning: what passing means.
    """
    against = f", against {judged.last}" if judged.last else ""
    return Finding(
        headline=headline(judged),
        facts=(
            *facts_of(judged.clauses, judged.found),
            ("fixed", _names(judged, ExpectationStatus.FIXED)),
            ("environment", one_line(changes_in_words(judged.night.changed))),
            ("night", f"{judged.night.label}{against}: {judged.verdict}"),
            ("report", ", ".join(reports)),
        ),
        notes=(*notes_of(judged.clauses), *map(one_line, judged.remarks), *filter(None, meaning.split("\n\n"))),
        next=next_of(judged.clauses) or tuple(commands),
        equal=not judged.got_worse,
        differs=judged.got_worse,
        data=_data(judged, reports),
    )


def _names(judged: JudgedNight, status: ExpectationStatus) -> str:
    return join_limited([one_line(each.key[-1]) for each in judged.judgements if each.status is status], 5)


def _data(judged: JudgedNight, reports: Sequence[str]) -> dict[str, Any]:
    words = Counter(judgement.word for judgement in judged.judgements)
    return {
        "night": judged.night.label,
        "compared_with": judged.last,
        "worse": judged.got_worse,
        "classes": data_of(judged.clauses),
        "counts": dict(words),
        "problems": list(judged.night.problems),
        "reports": list(reports),
        "models": [_model(judgement) for judgement in judged.judgements],
    }


def _model(judgement: Judgement) -> dict[str, Any]:
    return {
        **dict(zip(ROW_KEY, judgement.key, strict=True)),
        "verdict": judgement.word,
        "worse": judgement.worse,
        "expected": judgement.expected,
        "before": judgement.before,
        "now": judgement.now,
        "note": judgement.note,
    }
