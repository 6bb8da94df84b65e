"""The report as one HTML file, for a reader who has a minute: what changed, which kernel, why, what to do.

Pure: plain values in, text out. The file needs nothing else and loads nothing: style and script stand in it, and its
content security policy admits these two by their digests alone. Names, errors and whatever else comes from models are
escaped by the template engine, and control characters in them become spaces.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hashbench.catalog import CAUSES, LETTERS, REPEATED, STATUSES, Kind, family_of, kind_of, letter_of, status_of
from hashbench.records import LABELS, Row
from hashbench.report.compare import EnvironmentChange, merged
from hashbench.report.diagnoses import Excerpt, anchor_of, model_views
from hashbench.report.expectations import ExpectationStatus, Judged, Judgement, counted, rows_of_models
from hashbench.report.history import History, Measured, ModelHistory, Night
from hashbench.results.rows import is_link
from hashbench.text import (
    count,
    deterministic_here,
    how_much,
    how_often,
    one_line,
    rate,
    scope_words,
    shorten,
    spaced,
    suite_words,
    when,
)

LONGEST_TEXT = 3000
"""Characters of one text of a model's that a page shows."""

KIND_WORDS = {
    "differ": "differ",
    "latent": "pass, and will not always",
    "fail": "fail",
    "skip": "skipped",
    "pass": "pass",
}


def render_html(
    judged: Judged,
    *,
    excerpts: Mapping[tuple[str, ...], Excerpt] | None = None,
    tracebacks: Mapping[tuple[str, ...], str] | None = None,
    title: str = "hashbench",
    now: datetime | None = None,
) -> str:
    """The page. ``excerpts`` and ``tracebacks`` are what :func:`~hashbench.report.diagnoses.read_excerpts` and
    :func:`~hashbench.report.diagnoses.read_tracebacks` read. The text encodes as UTF-8 whatever the names hold."""
    history, judgements = judged.history, judged.judgements
    models = model_views(history, excerpts or {}, tracebacks)
    detailed = frozenset(model.index for model in models)
    style, script = _bundled("style.css"), _bundled("report.js")
    return (
        _environment()
        .get_template("report.html")
        .render(
            judged=judged,
            nights=history.nights,
            title=title,
            headline=headline(judged),
            machine=machine_of(judged.night),
            size=rows_of_models([one for one in judged.judgements if one.new is not None]),
            now=now.strftime("%Y-%m-%d %H:%M") + (f" {now.tzname()}" if now.tzname() else "") if now else "",
            policy=policy_for(style, script),
            style=Markup(style),
            script=Markup(script),
            payload=as_script_content(payload_of(history, detailed=detailed)),
            # what changed
            counts=Counter((one.word, one.worse) for one in judgements),
            news=groups_of(filter(is_news, judgements)),
            known=groups_of(filter(is_known, judgements)),
            indices={model.key: index for index, model in enumerate(history.models)},
            expectations={one.key: one for one in judgements if one.expected},
            problems=[f"{night.label}: {problem}" for night in reversed(history.nights) for problem in night.problems],
            # how many, and over time
            totals=totals_of(history),
            course=course_of(history.nights),
            measured=[
                (label, sparkline(values, nights=len(history.nights)), unit)
                for label, unit, values in (
                    ("Seconds that all models took", "seconds", _measured(history, "seconds")),
                    ("Largest memory of a model", "MiB", _measured(history, "memory_mib")),
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


@functools.cache  # compiling the templates takes longer than filling them
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hashbench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_presentable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "causes": CAUSES,
        "status_of": status_of,
        "deterministic_here": deterministic_here,
        "how_much": how_much,
        "how_often": how_often,
        "labelled": _labelled,
        "letters": LETTERS,
        "kind_words": KIND_WORDS,
        "repeated": REPEATED,
        "changes_text": changes_text,
        "count_of": count,
        "expectation_of": expectation_of,
        "is_link": is_link,
        "kind_of": kind_of,
        "letter_of": letter_of,
        "rows_of_models": rows_of_models,
        "anchor_of": anchor_of,
        "sparkline": sparkline,
        "measures": _MEASURES,
        "rate_words": rate,
        "scope_words": scope_words,
        "shorten": shorten,
        "spaced": spaced,
        "when": when,
        "suite_words": suite_words,
    }
    return environment


def _labelled(row: Row) -> list[tuple[str, str]]:
    """The columns that are shown by a label of their own."""
    return [(label, getattr(row, column)) for column, label in LABELS.items()]


def _presentable(value: Any) -> Any:
    """What a template shows of a value: a text on one line, without control characters, and of moderate length."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = one_line(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _bundled(name: str) -> str:
    return resources.files("hashbench.report").joinpath("templates", name).read_text(encoding="utf-8")


def policy_for(style: str, script: str) -> str:
    """A content security policy under which this style and this script run and nothing else does: no other script, also
    no handler in an attribute, no image, no connection."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    style_digest, script_digest = digests
    return (
        f"default-src 'none'; style-src 'sha256-{style_digest}'; script-src 'sha256-{script_digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def headline(judged: Judged) -> str:
    """The answer in a few words."""
    worse = [one for one in judged.judgements if one.worse]
    if judged.alone:
        text = counted(judged.judgements)
    else:
        text = f"{rows_of_models(worse)} got worse" if worse else "Nothing got worse"
    broken = f"{', but' if text.startswith('Nothing') else ', and'} the night is not whole"
    return text + (broken if judged.night.problems else "") + judged.not_compared


# ------------------------------------------------------------------------------------------------ what changed

MEMBERS = 100
"""Models that a group names at most."""

GROUPS = 40
"""Groups that one status has at most."""

MEMBERS_IN_ALL = 3000
"""Models that all groups together name at most."""

_GONE = (ExpectationStatus.FIXED, ExpectationStatus.NOT_SEEN, ExpectationStatus.STALE)
_ROW_SAYS_NOTHING = (
    *(ExpectationStatus.FIXED, ExpectationStatus.STALE),
    *(ExpectationStatus.NOT_COMPARABLE, ExpectationStatus.MISSING),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Models that stand alike for the same reason: after an update of a library forty may differ by one kernel, and a
    reader wants that said once. ``omitted`` counts those that are not in ``members``."""

    members: tuple[Judgement, ...]
    size: int

    @property
    def first(self) -> Judgement:
        """The model whose row tells what is wrong."""
        return self.members[0]

    @property
    def row(self) -> Row:
        """The row of ``first`` that says what is wrong."""
        return telling_row(self.first)

    @property
    def omitted(self) -> int:
        """How many models ``members`` leaves out."""
        return self.size - len(self.members)

    @property
    def in_other_modules(self) -> bool:
        """Whether other models of it differ in another module than ``row`` does; of those left out nobody knows."""
        return self.omitted > 0 or any(telling_row(member).module != self.row.module for member in self.members)

    @property
    def names_kernel(self) -> bool:
        """Whether its kernel and cause are to be told."""
        return kind_of(self.row.accuracy).has_cause and self.first.status is not ExpectationStatus.MISSING

    @property
    def kind(self) -> str:
        """What it looks like: ``fixed``, ``absent``, ``skip``, ``differ``, ``fail``."""
        if self.first.status in (ExpectationStatus.FIXED, ExpectationStatus.STALE):
            return "fixed"
        return Kind.ABSENT if self.first.new is None else kind_of(self.row.accuracy)

    @property
    def why(self) -> str:
        """The error or the note, where the kernel does not say all."""
        if self.first.status is ExpectationStatus.MISSING:
            return "There is no row of it in the last night."
        if self.first.status is ExpectationStatus.NOT_COMPARABLE:
            return self.first.note
        return "" if self.names_kernel else self.row.error or self.first.note or self.row.accuracy

    @property
    def advice(self) -> str:
        """What to do."""
        status = self.first.status
        return status.advice if status in _ROW_SAYS_NOTHING else self.row.advice or status.advice


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups, and how many models in further groups there is no room for."""

    shown: tuple[Group, ...] = ()
    omitted: int = 0

    @property
    def size(self) -> int:
        """How many models all groups have."""
        return sum(group.size for group in self.shown) + self.omitted


def is_news(one: Judgement) -> bool:
    """Whether a reader must be told first: it got worse, or better, or nobody expected anything of it and it does not
    pass."""
    if one.status is ExpectationStatus.UNEXPECTED:
        return one.in_trouble
    return one.worse or one.status in (ExpectationStatus.STALE, ExpectationStatus.FIXED)


def is_known(one: Judgement) -> bool:
    """Whether it is in trouble and nobody is surprised."""
    return not is_news(one) and (one.in_trouble or one.status is ExpectationStatus.NOT_SEEN)


def groups_of(judgements: Iterable[Judgement]) -> Groups:
    """``judgements``, those alike together: first what got worse, then by status, differences before failures, the
    largest group first."""
    alike: dict[tuple[str, ...], list[Judgement]] = {}
    for one in judgements:
        alike.setdefault((one.status, *_reason(one)), []).append(one)
    order = list(ExpectationStatus)
    kinds = list(KIND_WORDS)

    def urgency(same: Sequence[Judgement]) -> tuple[bool, int, int, int]:
        kind = kind_of(same[0].now)
        kind_rank = kinds.index(kind) if kind in kinds else len(kinds)
        return not same[0].worse, order.index(same[0].status), kind_rank, -len(same)

    ranked = sorted(alike.values(), key=urgency)
    seen: Counter[ExpectationStatus] = Counter()
    groups, left, omitted = [], MEMBERS_IN_ALL, 0
    for same in ranked:
        seen[same[0].status] += 1
        if seen[same[0].status] > GROUPS:
            omitted += len(same)
        else:
            groups.append(Group(tuple(same[: max(1, min(left, MEMBERS))]), len(same)))
            left -= len(groups[-1].members)
    return Groups(tuple(groups), omitted)


def telling_row(one: Judgement) -> Row:
    """The row that says what is wrong: the new one; of what is gone or mended, the old one."""
    row = (one.base or one.new) if one.status in _GONE else (one.new or one.base)
    if row is None:
        raise ValueError("a judgement has a row on one side at least")
    return row


def _reason(one: Judgement) -> tuple[str, ...]:
    """What a judgement must have in common with others to be told with them."""
    row = telling_row(one)
    if one.status is ExpectationStatus.MISSING:
        return one.key[:-1]
    reason = one.note if one.status is ExpectationStatus.NOT_COMPARABLE else ""
    if kind_of(row.accuracy).has_cause:
        return reason, row.kernel, row.cause or row.origin
    return reason, row.accuracy, shorten(row.error, 80)


def expectation_of(one: Judgement) -> str:
    """What a CSV of expected rows says of it; empty where it says nothing."""
    if not one.expected:
        return ""
    text = f"{one.before} expected" + (f" since {one.since}" if one.since else "")
    return text + (f", not seen for {count(one.unseen, 'night')}" if one.unseen else "")


# -------------------------------------------------------------------------------------------------------- totals


def totals_of(history: History) -> dict[str, Any]:
    """What is counted of the last night: ``kinds`` and the ``change`` of each since the night before (``None``: there
    is none), ``models`` (of which one may have several rows), ``statuses`` as ``(status, now, before)``, ``suites`` as
    ``(suite, mode, count per kind)``, those with the most that differ first, and ``kernels`` as ``(kernel, cause,
    rows)``, the largest first."""
    now = history.nights[-1].counts
    # A night that could not be read tells nothing of what there was before.
    before = next((night.counts for night in reversed(history.nights[:-1]) if night.counts), None)
    kinds, earlier = by_kind(now), by_kind(before or {})
    if not kinds[Kind.LATENT] and not earlier[Kind.LATENT]:
        kinds.pop(Kind.LATENT)  # no night was stressed
    order = {status: rank for rank, status in enumerate(STATUSES)}
    ranks = {kind: rank for rank, kind in enumerate(KIND_WORDS)}
    rows = [model.newest for model in history.models if model.newest is not None]
    suites: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        suites.setdefault((row.suite, row.mode), Counter())[row.accuracy] += 1
    kernels = Counter(
        (row.kernel or f"({row.origin or 'unknown'})", row.cause) for row in rows if kind_of(row.accuracy).has_cause
    )
    return {
        "kinds": kinds,
        "models": len({(row.suite, row.name) for row in rows}),
        "change": {kind: None if before is None else kinds[kind] - earlier[kind] for kind in kinds},
        "statuses": [
            (status, now.get(status, 0), None if before is None else before.get(status, 0))
            for status in sorted(
                {*now, *(before or ())},
                key=lambda status: (
                    ranks.get(kind_of(status), len(ranks)),
                    order.get(family_of(status), len(order)),
                    status,
                ),
            )
        ],
        "suites": sorted(
            ((*suite, _only(kinds, by_kind(counts))) for suite, counts in suites.items()),
            key=lambda suite: (*(-number for number in suite[2].values()), suite[:2]),
        ),
        "kernels": sorted(((*kernel, n) for kernel, n in kernels.items()), key=lambda kernel: (-kernel[2], kernel)),
    }


def _only(kinds: Collection[str], counts: Mapping[str, int]) -> dict[str, int]:
    return {kind: number for kind, number in counts.items() if kind in kinds}


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """How many of each of :data:`KIND_WORDS`, from counts per status."""
    kinds = dict.fromkeys(KIND_WORDS, 0)
    for status, number in counts.items():
        if kind_of(status) in kinds:
            kinds[kind_of(status)] += number
    return kinds


@dataclass(frozen=True, slots=True)
class Course:
    """How many models differ or fail, night by night, as outlines of a drawing that is as wide as there are nights and
    100 high; ``top`` is the count at the top. ``marks`` are the nights whose environment is another than before."""

    differ: str
    both: str
    top: int
    marks: tuple[int, ...]


def course_of(nights: Sequence[Night]) -> Course:
    """The course over all nights."""
    kinds = [by_kind(night.counts) for night in nights]
    both = [kind["differ"] + kind["fail"] for kind in kinds]
    top = max(both, default=0)
    marks = tuple(index for index, night in enumerate(nights) if night.changed)
    return Course(_outline([kind["differ"] for kind in kinds], top), _outline(both, top), top, marks)


def _outline(counts: Sequence[int], top: int) -> str:
    """An SVG path of steps. Equal neighbours are one step: a thousand quiet nights cost a few bytes."""
    if not top:
        return ""
    path, at = "M0 100", 0
    for number, run in groupby(counts):
        at += len(list(run))
        path += f"V{round(100 - 100 * number / top, 1):g}H{at}"
    return f"{path}V100Z"


_MEASURES = {"rate": ("How often it differs", ""), "seconds": ("Seconds", "s"), "peak_memory_mib": ("Memory", "MiB")}
"""Of each of the columns whose course is kept, what it is called, and its unit."""

STEPS = 100
"""Steps that a sparkline has at most; where there are more nights, each step shows the largest of several."""


ACROSS = 400
"""How wide a sparkline is, in the units of its drawing: about as many pixels, since a line that is stretched blurs."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """The course of a number as the outline of a drawing :data:`ACROSS` wide and 100 high, with its largest number at
    the top and 0 at the bottom; ``newest``, ``least`` and ``most`` as texts."""

    path: str
    newest: str
    least: str
    most: str


def sparkline(values: Measured, *, nights: int) -> Sparkline | None:
    """The sparkline of ``values`` over that many nights; ``None`` where there are none. A night without a value is a
    gap."""
    if not values:
        return None
    top = max(value for _, value in values) or 1.0
    width = -(-nights // STEPS)
    steps: dict[int, float] = {}
    for night, value in values:
        steps[night // width] = max(value, steps.get(night // width, 0.0))
    path, end, height = "", -1, -1
    for step, value in steps.items():
        begin, level = step * width, round(100 - 100 * value / top)
        if begin != end:
            path += f"M{_across(begin, nights)} {level}"
        elif level != height:
            path += f"V{level}"
        else:
            path = path[: path.rindex("H")]
        end, height = min(nights, begin + width), level
        path += f"H{_across(end, nights)}"
    numbers = [value for _, value in values]
    return Sparkline(path, *(f"{value:.4g}" for value in (numbers[-1], min(numbers), max(numbers))))


def _across(night: int, nights: int) -> int:
    return round(ACROSS * night / nights)


def _measured(history: History, name: str) -> Measured:
    values = ((index, getattr(night, name)) for index, night in enumerate(history.nights))
    return tuple((index, value) for index, value in values if value is not None)


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
"""What is said of the machine first: the label, and the entries of its environment."""


def machine_of(night: Night) -> list[tuple[str, str]]:
    """On what the night ran, as labels and texts: torch and its commit, the CPU, threads. Where its sweeps ran in
    several environments, all of their values; nothing of what no environment tells."""
    entries = merged(night.environments.values())
    entries["torch.git"] = " or ".join(text[:12] for text in entries.get("torch.git", "").split(" or "))
    told = ((label, [entries[key] for key in keys if entries.get(key)]) for label, keys in _MACHINE.items())
    return [(label, shorten(one_line(", ".join(texts)), 120)) for label, texts in told if texts]


# ------------------------------------------------------------------------------------- the data of the heat map

INTERVALS = 200_000
"""Intervals that a page holds at most; where there are more, the oldest nights are left out."""

NAME = 80
"""Characters of a name."""


def payload_of(history: History, *, detailed: Collection[int] = ()) -> dict[str, object]:
    """What the page's script draws the heat map from. ``detailed`` are the indices of the models that the page has a
    diagnosis of.

    ``models`` holds ``[scope, name, detailed, intervals]`` each, intervals as a flat list of ``gap, length, state`` and
    states as indices into a table, so that ten thousand models over a thousand nights take about a megabyte.
    """
    start = first_night_shown(history)
    scopes: dict[tuple[str, ...], int] = {}
    states: dict[tuple[str, str, str], int] = {}
    models = [
        [
            scopes.setdefault(model.key[:-1], len(scopes)),
            _name(model.key[-1]),
            int(index in detailed),
            list(_flat(model, start, states)),
        ]
        for index, model in enumerate(history.models)
    ]
    nights = history.nights[start:]
    return {
        "start": start,
        "nights": [_name(night.label) for night in nights],
        "marks": {index: changes_text(night.changed) for index, night in enumerate(nights) if night.changed},
        "scopes": [[_name(part) for part in scope] for scope in scopes],
        "states": [
            [_name(accuracy), letter_of(accuracy), kind_of(accuracy), _name(kernel), _name(cause)]
            for accuracy, kernel, cause in states
        ],
        "models": models,
    }


def first_night_shown(history: History, *, limit: int = INTERVALS) -> int:
    """The earliest night from which on all intervals fit into ``limit``."""
    if sum(len(model.intervals) for model in history.models) <= limit:
        return 0
    ends = sorted((interval.last for model in history.models for interval in model.intervals), reverse=True)
    return min(ends[limit] + 1, max(0, len(history.nights) - 1))


def _flat(model: ModelHistory, start: int, states: dict[tuple[str, str, str], int]) -> Iterator[int]:
    at = start
    for interval in model.intervals:
        if interval.last < start:
            continue
        first = max(interval.first, start)
        state = states.setdefault((interval.accuracy, interval.kernel, interval.cause), len(states))
        yield from (first - at, interval.last - first + 1, state)
        at = interval.last + 1


def changes_text(changes: Sequence[EnvironmentChange], *, limit: int = 3) -> str:
    """``packages.torch 2.15.0 → 2.16.0, threads.intra_op 2 → 4 and 3 more``."""
    texts = [
        f"{shorten(one.key, 40)} {shorten(one.base, 30) or '(none)'} → {shorten(one.new, 30) or '(none)'}"
        for one in changes[:limit]
    ]
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return shorten(one_line(", ".join(texts) + more), 400)


def _name(text: str) -> str:
    return shorten(one_line(text), NAME)


def as_script_content(content: object) -> Markup:
    """JSON that may stand inside ``<script>``: no text in it can end the element, begin a comment in it, or break a
    line (U+2028, U+2029: JSON in ASCII has none of those)."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)
