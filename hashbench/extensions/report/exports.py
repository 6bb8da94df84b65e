"""Export a night: GitHub's Markdown, JUnit XML, and workflow commands of GitHub Actions.

Names and errors come from models and are escaped. Each format has a limit; what exceeds it is counted, and nothing is
cut in the middle.
"""

from __future__ import annotations

import functools
import html
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tabulate import tabulate

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.extensions import blamed, rate_of, remarks_of, remedy, words_for
from hashbench.core.records import Row, is_link, value_of
from hashbench.core.report.sentence import next_of, notes_of
from hashbench.core.report.text import escape_markdown
from hashbench.core.results.rows import row_key
from hashbench.core.text import count, join_limited, one_line, printable, shorten
from hashbench.extensions.report.expectations import STALE_AFTER, ExpectationStatus, JudgedNight, Judgement
from hashbench.extensions.report.history import same_but_for_the_tracer, seen
from hashbench.extensions.report.verdict import headline

# -------------------------------------------------------------------------------------------------- Markdown

LIMIT = 900_000
"""Maximum bytes of UTF-8; GitHub shows no job summary of more than 1 MiB."""

_SIZES = ((500, 100), (200, 30), (60, 8), (15, 0))
"""Lines of a table, and diagnoses, from generous to short: the first pair that fits :data:`LIMIT` is used; the last
always fits."""

_CELL = 90
_WIDTHS = {"model": 60, "what to do": 2 * _CELL}
"""Maximum characters of a cell, by column."""

_FOUND = (("What differs", Kind.DIFFER), ("What is flaky", Kind.LATENT), ("What fails", Kind.FAIL))

Cells = Mapping[str, str]
"""One line of a table, by column; :class:`Markup` is Markdown already."""


def as_markdown(judged: JudgedNight) -> str:
    """Return the job summary of the last night: changes, totals, then the rest; at most :data:`LIMIT` bytes."""
    text = ""
    for lines, details in _SIZES:
        text = _markdown(judged, lines=lines, details=details)
        if len(text.encode()) <= LIMIT:
            break
    return text


def as_summary(judged: JudgedNight) -> str:
    """Return the beginning of the job summary for a terminal: changes and totals."""
    return _markdown(judged, lines=40, details=0, only_beginning=True)


def _markdown(judged: JudgedNight, *, lines: int, details: int, only_beginning: bool = False) -> str:
    history = judged.history
    rows = [judgement.new for judgement in judged.judgements if judgement.new]
    passing = [row for row in rows if kind_of(row.accuracy) is Kind.PASS]
    text = (
        _environment()
        .get_template("night.md.jinja")
        .render(
            history=history,
            judged=judged,
            headline=headline(judged),
            notes=notes_of(judged.clauses),
            commands=next_of(judged.clauses),
            lines=lines,
            details=details,
            only_beginning=only_beginning,
            new=_not_passing(judged, only=judged.new_trouble),
            worse=[_worse(judgement) for judgement in judged.judgements if judgement.worse],
            kinds=list(_FOUND) if judged.alone else [],
            changed=_changed(judged),
            environment=[
                {"what": change.key, "before": change.base, "now": change.new} for change in judged.night.changed
            ],
            totals=list(_totals(rows)),
            not_passing=_not_passing(judged),
            found={kind: _not_passing(judged, kind=kind) for _, kind in _FOUND},
            skipped=sum(kind_of(row.accuracy) is Kind.SKIP for row in rows),
            expectations=[] if judged.alone else list(_expectations(judged)),
            not_asked=sum(judgement.status is ExpectationStatus.NOT_ASKED for judgement in judged.judgements),
            older_problems=[
                f"{night.label}: {problem}" for night in history.nights[-2::-1] for problem in reversed(night.problems)
            ],
            diagnosed=[row for row in rows if row.because or row.detail],
            why=lambda row: words.why_with_stage(row) if (words := words_for(row)) else "",
            where=lambda row: words.where(row) if (words := words_for(row)) else "",
            remedy=remedy,
            remarks=list(_remarks(passing)),
            repros=_repros(judged),
            row_key=row_key,
        )
    )
    return printable(text.rstrip()) + "\n"


def _remarks(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what extensions say of rows, each text once, behind the models that have it."""
    models: dict[str, list[str]] = {}
    for row in rows:
        for text in remarks_of(row):
            models.setdefault(text, []).append(f"{row.name} ({row.mode})")
    return (f"{join_limited(names)}: {text}" for text, names in models.items())


@functools.cache  # compiling a template takes longer than filling it
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hashbench.extensions.report"),
        autoescape=False,  # for Markdown, which finalize escapes
        undefined=StrictUndefined,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "as_html": lambda text: Markup(html.escape(one_line(text))),
        "bullets": _bullets,
        "count": count,
        "shorten": shorten,
        "table": _table,
    }
    return environment


def _repros(judged: JudgedNight) -> dict[tuple[str, ...], str]:
    """Return the paths of the last night's repros, by model key."""
    last = len(judged.history.nights) - 1
    troubles = {model.key: model.trouble for model in judged.history.models}
    return {
        key: str(trouble.folder / trouble.row.repro)
        for key, trouble in troubles.items()
        if trouble is not None and trouble.night == last and trouble.row.repro
    }


def _escaped(value: object) -> str:
    return value if isinstance(value, Markup) else escape_markdown(str(value))


def _bullets(lines: Sequence[str], most: int) -> Markup:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return Markup("\n".join(f"- {_escaped(shorten(line, 700))}" for line in [*lines[:most], *more]))


def _table(lines: Sequence[Cells], most: int) -> Markup:
    """Format a table of at most ``most`` lines, without empty columns."""
    columns = [column for column in lines[0] if any(line[column] for line in lines[:most])]
    body = [[_cell(line[column], _WIDTHS.get(column, _CELL)) for column in columns] for line in lines[:most]]
    text = tabulate(body, headers=[_escaped(column) for column in columns], tablefmt="pipe", disable_numparse=True)
    return Markup(text if len(lines) <= most else f"{text}\n\n{len(lines) - most} more are not shown here.")


def _cell(text: str, width: int) -> str:
    return text if isinstance(text, Markup) else escape_markdown(shorten(text, width))


def _link(link: str) -> str:
    return Markup(f"[link]({link})") if link and is_link(link) else ""


def _model(key: Sequence[str]) -> Cells:
    suite, mode, dtype, device, name = key
    return {"model": name, "suite": suite, "mode": mode, "dtype": dtype, "device": device}


def _worse(judgement: Judgement) -> Cells:
    before = judgement.before or "no row"
    expected = before if judgement.expected or judgement.since else f"{before} (last night)"
    cells = {"expected": judgement.expected_as(expected), "now": judgement.now or "no row", "why": judgement.note}
    return {"what": judgement.word, **_model(judgement.key), **cells, "link": _link(judgement.link)}


def _changed(judged: JudgedNight) -> list[Cells]:
    """List models whose result differs from the night before, whatever is expected of them."""
    last, models = len(judged.history.nights) - 1, judged.history.models
    moves = [(model.key, model.at(judged.before), model.at(last)) for model in models]
    shown = [
        (key, seen(before), seen(now))
        for key, before, now in moves
        if not (before and now and same_but_for_the_tracer(before, now))
    ]
    changes = sorted((now == "pass", key, before, now) for key, before, now in shown if before != now)
    return [{**_model(key), "before": before, "now": now} for _, key, before, now in changes]


def _totals(rows: Sequence[Row]) -> Iterator[Cells]:
    """Count rows by suite, mode, dtype, device and status, the most frequent status first."""
    statuses = [status for status, _ in Counter(row.accuracy for row in rows).most_common()]
    counts = Counter(((row.suite, row.mode, row.dtype, row.dev), row.accuracy) for row in rows)
    groups = sorted({group for group, _ in counts})
    for group in groups:
        where = dict(zip(("suite", "mode", "dtype", "device"), group, strict=True))
        yield {**where, **{status: str(counts[group, status]) for status in statuses}}
    if len(groups) > 1:
        sums = {status: str(sum(counts[group, status] for group in groups)) for status in statuses}
        yield {"suite": "all", "mode": "", "dtype": "", "device": "", **sums}


def _not_passing(
    judged: JudgedNight, *, kind: Kind | None = None, only: Collection[Judgement] | None = None
) -> list[Cells]:
    """List the rows that differ or fail, or those of one kind, or ``only`` these."""
    nights, models = judged.history.nights, {model.key: model for model in judged.history.models}
    lines: list[Cells] = []
    for judgement in judged.judgements if only is None else only:
        if judgement.new is None or not judgement.in_trouble or kind not in (None, kind_of(judgement.now)):
            continue
        row, link, model = judgement.new, _link(judgement.link), models.get(judgement.key)
        newest = model.standing if model else None
        cells = {
            "kernel": blamed(row) or row.origin,
            "under": value_of(row, "latent") or "",
            "stage": _sure(value_of(row, "stage") or "", row),
            "cause": _sure(row.cause, row),
            "module": row.module,
            "rate": rate_of(row),
            "expected": ""
            if judged.alone
            else Markup(f"{_escaped(judgement.word)} ({link})")
            if link
            else judgement.word,
            "for nights": f"{newest.nights}, since {nights[newest.first].label}" if newest else "",
            "what to do": remedy(row) or row.error,
        }
        lines.append({"status": row.accuracy, **_model(judgement.key), **cells})
    return lines


def _sure(word: str, row: Row) -> str:
    """Return a cause or a stage with its confidence."""
    return f"{word} ({row.confidence})" if word and row.confidence else word


_EXPECTATION_HEADINGS = {
    ExpectationStatus.STALE: f"Not seen in {STALE_AFTER} nights or more: take the expectation out if the difference "
    "is gone",
    ExpectationStatus.FIXED: "Passes and was expected not to",
    ExpectationStatus.NOT_SEEN: "Differs only now and then, and did not tonight",
}


def _expectations(judged: JudgedNight) -> Iterator[tuple[str, list[Cells]]]:
    for status, heading in _EXPECTATION_HEADINGS.items():
        lines = [
            _expected(judgement)
            for judgement in judged.judgements
            if judgement.status is status and not judgement.worse
        ]
        if lines:
            yield heading, lines


def _expected(judgement: Judgement) -> Cells:
    seen_cells = {
        "nights not seen": str(judgement.unseen or ""),
        "last seen": judgement.seen,
        "link": _link(judgement.link),
    }
    return {**_model(judgement.key), "expected": judgement.expected_as(judgement.before), **seen_cells}


# ------------------------------------------------------------------------------------------------- JUnit XML


_FACTS = (
    *("origin", "stage", "kernel", "op", "module", "source", "phase", "cause", "confidence", "because"),
    *("differing_results", "detail"),
    *("beyond_rounding", "eager_rounding", "semantic", "cured_by", "reference", "compilations"),
    *("evidence", "advice", "repro", "error"),
)


def as_junit(judged: JudgedNight, *, tracebacks: Mapping[tuple[str, ...], str] | None = None) -> str:
    """Return the JUnit XML of the last night: one test case per model it was asked to run.

    A model that got worse is a failure; with nothing to compare with, so is one that differs or fails. A model that
    differs or fails as expected, and one that was skipped, are skipped test cases with the reason. There is no official
    schema; the output keeps to what Ant, Jenkins and pytest have in common.

    Args:
        judged: the last night, judged.
        tracebacks: tracebacks of failed models, by model key.
    """
    repros, traceback_of = _repros(judged), tracebacks or {}
    root = ElementTree.Element("testsuites", name=f"hashbench {judged.night.label}: {judged.verdict}")
    suites: dict[str, list[ElementTree.Element]] = {}
    for judgement in sorted(judged.judgements, key=lambda each: each.key):
        if judgement.status is not ExpectationStatus.NOT_ASKED:
            name = ".".join(filter(None, judgement.key[:-1]))
            suites.setdefault(name, []).append(
                _case(name, judgement, judged, repros=repros, traceback=traceback_of.get(judgement.key, ""))
            )
    for problem in judged.night.problems:
        case = ElementTree.Element("testcase", classname="night", name=problem[:200])
        ElementTree.SubElement(case, "failure", message=problem, type="problem")
        suites.setdefault("night", []).append(case)
    for name, cases in suites.items():
        began = judged.night.when.partition("+")[0]
        ElementTree.SubElement(root, "testsuite", name=name, timestamp=began).extend(cases)
    for parent in (*root, root):
        cases = list(parent.iter("testcase"))
        for counted, tag in (("tests", ""), ("failures", "failure"), ("skipped", "skipped")):
            parent.set(counted, str(sum(not tag or case.find(tag) is not None for case in cases)))
        parent.set("errors", "0")
        parent.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")
    ElementTree.indent(root)
    text = printable(ElementTree.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _case(
    suite: str, judgement: Judgement, judged: JudgedNight, *, repros: Mapping[tuple[str, ...], str], traceback: str
) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=suite, name=judgement.key[-1])
    if judgement.new is not None and judgement.new.seconds is not None:
        case.set("time", f"{judgement.new.seconds:.3f}")
    values = {column: value_of(judgement.new, column) for column in _FACTS} | {"repro": repros.get(judgement.key, "")}
    facts = "\n".join(f"{column}: {value}" for column, value in values.items() if value)
    facts = "\n\n".join(filter(None, (facts, traceback if kind_of(judgement.now) is Kind.FAIL else "")))
    kind = kind_of(judgement.now)
    if judgement.worse or (judged.alone and judgement.in_trouble):
        message, word = judged.message_of(judgement), judged.word_of(judgement)
        ElementTree.SubElement(case, "failure", message=message, type=word).text = facts
    elif kind is Kind.SKIP:
        ElementTree.SubElement(case, "skipped", message=judgement.new.error if judgement.new else "")
    elif kind is Kind.LATENT:
        ElementTree.SubElement(case, "system-out").text = f"{judgement.message}\n\n{facts}"
    elif kind is not Kind.PASS:
        ElementTree.SubElement(case, "skipped", message=judgement.message)
        ElementTree.SubElement(case, "system-out").text = facts
    elif judgement.status not in (ExpectationStatus.MET, ExpectationStatus.UNEXPECTED):
        ElementTree.SubElement(case, "system-out").text = judgement.message
    return case


# ----------------------------------------------------------------------------------------- GitHub annotations

MOST = 10
"""Maximum annotations of one level that GitHub shows per step."""


def as_annotations(judged: JudgedNight) -> str:
    """Return ``::error title=…::…`` lines, which GitHub Actions shows on the page of a run.

    An error for each model that got worse; a warning for unexpected trouble, stale expectations and a changed
    environment. With nothing to compare with, the first line is the verdict; with nothing to report, the text is empty.
    Beyond :data:`MOST` of a level, the last line counts the others.
    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    worse = [judgement for judgement in judged.judgements if judgement.worse]
    errors = [_annotation("error", "The night is not whole", problem) for problem in judged.night.problems]
    errors += [_annotation_of("error", judgement, judged) for judgement in worse]
    warnings = [
        _annotation_of("warning", judgement, judged)
        for judgement in judged.judgements
        if _asks_for_attention(judgement)
    ]
    if judged.night.changed:
        changes = "; ".join(map(str, judged.night.changed))
        warnings.insert(0, _annotation("warning", "The environment changed", changes))
    counts = ", ".join(f"{number} {word}" for word, number in Counter(judgement.word for judgement in worse).items())
    in_all = f" In all: {counts}." if counts else ""
    found = [_annotation("notice", f"hashbench {judged.night.label}", judged.verdict)] if judged.alone else []
    return "".join((*found, *_at_most(errors, "error", in_all), *_at_most(warnings, "warning", "")))


def _asks_for_attention(judgement: Judgement) -> bool:
    unexpected = judgement.status is ExpectationStatus.UNEXPECTED and judgement.in_trouble
    return not judgement.worse and (unexpected or judgement.status is ExpectationStatus.STALE)


def _at_most(lines: Sequence[str], level: str, in_all: str) -> Iterable[str]:
    if len(lines) <= MOST:
        return lines
    more = f"{len(lines) - MOST + 1} more {level}s of hashbench"
    return [*lines[: MOST - 1], _annotation(level, more, f"{more} are in the report.{in_all}")]


def _annotation_of(level: str, judgement: Judgement, judged: JudgedNight) -> str:
    suite, mode, *_, name = judgement.key
    return _annotation(level, f"{name} ({suite}, {mode}): {judged.word_of(judgement)}", judged.message_of(judgement))


def _annotation(level: str, title: str, text: str) -> str:
    escaped = _data(shorten(one_line(title), 200)).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::{_data(shorten(one_line(text), 1000))}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
