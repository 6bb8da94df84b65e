"""The table at the end of a sweep: models that differ or fail with what to do, counts of the rest, and what passing
means."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from hashbench.core.catalog import Kind, Origin, kind_of, status_of
from hashbench.core.diagnose.causes import stats
from hashbench.core.extensions import all_words, remarks_of, remedy, shown, words_for
from hashbench.core.records import SAME_BUILD, Row, value_of
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.results.rows import ROWS
from hashbench.core.text import count, cut, join_limited, one_line, percent, shorten

COLUMNS = ("name", "accuracy", "origin", "kernel", "module", "phase", "cause", "confidence", "seconds")
"""Columns of the table, beside those of extensions. The origin is left out where there is a cause, as are empty
columns."""

_NARROWEST = {"module": 8, "name": 16}
"""Minimum widths of the columns that may be cut, in the order in which they are; no other is ever cut."""

_WHERE_THERE_IS_ROOM = ("kernel", "cause", "module", "origin", "phase", "confidence", "seconds")
"""Columns that a narrow table leaves out, the last first. Kernel, module and cause then have a line below the row, as
does a module that is cut."""

_ORDER = (Kind.DIFFER, Kind.LATENT, Kind.FAIL, Kind.SKIP, Kind.PASS)
_COLOURS = {Kind.DIFFER: "31", Kind.LATENT: "35", Kind.FAIL: "33", Kind.PASS: "32"}
_INDENT = "    "
_GAP = 2
_LONG = 60
"""Characters from which on a text that several rows share is said once."""

_MORE_RUNS = 60
"""Number of runs that the footer suggests where there were fewer."""


def sweep_table(
    rows: Sequence[Row],
    *,
    folder: Path | None = None,
    command: Callable[[Row], str] = lambda _: "",
    width: int | None = None,
    colour: bool = False,
    more_runs: bool = True,
    footer: bool = True,
) -> str:
    """Return what a sweep prints when it has ended.

    Args:
        rows: in the order of the sweep. Those that differ are listed first, then those that fail, each with what to do;
            those that pass or are skipped are counted.
        folder: of the repros and logs; ``None``: unknown.
        command: returns the command that reruns a row that differs or fails; empty for none.
        width: maximum length of a line; ``None``: unlimited. Commands are never broken.
        colour: use escape sequences for colours.
        more_runs: the command that made the rows takes ``--runs``.
        footer: end with what passing means; see :func:`what_passing_means`.
    """
    if not rows:
        return "No model was run."
    rows = [shown(row) for row in rows]
    by_kind = _by_kind(rows)
    listed = [*by_kind[Kind.DIFFER], *by_kind[Kind.LATENT], *by_kind[Kind.FAIL]]
    paint = _painted if colour else lambda text, _: text
    blocks = [
        "\n".join(_listed(listed, folder, command, width, paint)),
        "\n".join(_notes([*by_kind[Kind.SKIP], *by_kind[Kind.PASS]], width)),
        _counts(rows, by_kind, width, paint),
        what_passing_means(rows, width=width, more_runs=more_runs) if footer else "",
    ]
    return "\n\n".join(filter(None, blocks))


def what_passing_means(rows: Sequence[Row], *, width: int | None = None, more_runs: bool = True) -> str:
    """Return which differences passing rows may have missed, in plain words; empty where none passes."""
    by_kind = _by_kind([shown(row) for row in rows])
    passing, flaky = by_kind[Kind.PASS], by_kind[Kind.LATENT]
    eager = [row for row in passing if not any(words.speaks_of(row) for words in all_words())]
    bound = stats.rate_of(0, 1, distinct=1, of="runs").high
    paragraphs = (
        _what_runs_prove(eager, more_runs),
        *(words.what_passing_means([*passing, *flaky], bound=bound) for words in all_words()),
    )
    return "\n\n".join(_fill(text, width, indent="") for text in paragraphs if text)


def _by_kind(rows: Sequence[Row]) -> dict[Kind, list[Row]]:
    return {kind: [row for row in rows if kind_of(row.accuracy) is kind] for kind in _ORDER}


Paint = Callable[[str, Kind], str]


def _painted(text: str, kind: Kind) -> str:
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if kind in _COLOURS else text


# ------------------------------------------------------------------------------------------- what asks for attention


def _listed(
    rows: Sequence[Row], folder: Path | None, command: Callable[[Row], str], width: int | None, paint: Paint
) -> Iterator[str]:
    if not rows:
        return
    whole = {column: [_shown(value_of(row, column)) for row in rows] for column in _with_facts(COLUMNS, "after")}
    cells = _fitted(whole, width)
    aligned = ["right" if column == "seconds" else "left" for column in cells]
    # Without disable_numparse tabulate rewrites names that look like numbers: 1e5 becomes 100000.
    table = tabulate(cells, headers="keys", disable_numparse=True, colalign=aligned)
    header, rule, *lines = table.splitlines()
    yield from (header.rstrip(), rule)
    said: dict[str, str] = {}
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        yield paint(line.rstrip(), kind_of(row.accuracy))
        shown = {column for column, texts in cells.items() if texts[number] == whole[column][number]}
        yield from _below(row, shown, folder, command, width, said)


def _below(
    row: Row,
    shown: Collection[str],
    folder: Path | None,
    command: Callable[[Row], str],
    width: int | None,
    said: dict[str, str],
) -> Iterator[str]:
    """Yield the lines below a row: cells not in ``shown``, its error, what to do, where to look, and the command.
    ``said``: the long texts of the rows above, by text the first model, to which is added."""
    line = command(row)
    for text in (*_found(row, shown), *(_once(text, row, said) for text in _remarks(row))):
        if text:
            yield _fill(text, width)
    to_do = one_line(_remedy(row, ours=bool(line)))
    for label, text in (("to do: ", _once(to_do, row, said, shown=0)), *_places(row, folder)):
        if text:
            yield _fill(f"{label}{one_line(text)}", width)
    if line:
        yield f"{_INDENT}$ {line}"


def _once(text: str, row: Row, said: dict[str, str], *, shown: int = 40) -> str:
    """Return a text or, where a row above has the same long one, its first ``shown`` characters and that row's name."""
    first = said.setdefault(text, one_line(row.name))
    if first == one_line(row.name) or len(text) < _LONG:
        return text
    return f"{cut(text, shown)} (as for {first})" if shown else f"as for {first}"


def _found(row: Row, shown: Collection[str]) -> Iterator[str]:
    """Yield where a difference entered and why, in the words of an extension if the row is one of its kind."""
    words = words_for(row)
    if words is None:
        yield _place(row, shown)
        yield _cause(row, shown)
        return
    place, why = words.where(row), words.why(row) if "stage" in shown else words.why_with_stage(row)
    yield f"where: {place}" if place else ""
    yield f"why: {why}" if why else ""


def _place(row: Row, shown: Collection[str]) -> str:
    """Return ``where: aten.add.Tensor in Net.layer1, zoo.py:18 forward``, without cells that the table shows."""
    kernel = row.kernel if "kernel" not in shown else ""
    module = f"in {row.module}" if row.module and (kernel or "module" not in shown) else ""
    parts = filter(None, [f"{kernel} {module}".strip(), row.source])
    text = one_line(", ".join(parts))
    return f"where: {text}" if text else ""


def _cause(row: Row, shown: Collection[str]) -> str:
    if not row.cause or "cause" in shown:
        return ""
    return one_line(f"cause: {row.cause}{f' ({row.confidence})' if row.confidence else ''}")


def _remarks(row: Row) -> Iterator[str]:
    """Yield the error of a row, the results that were not compared, and code that ran in another way."""
    not_compared = f"not compared: {row.not_compared}" if row.not_compared else ""
    yield from (one_line(text) for text in (row.error, not_compared, row.compiled) if text)
    yield from remarks_of(row)
    yield from map(one_line, _unseen(row))


def _unseen(row: Row) -> Iterator[str]:
    """Yield what runs of one build under the deterministic flag do not show."""
    if row.second_build not in ("", SAME_BUILD):
        yield f"a second build from the same seed: {row.second_build}"
    if row.deterministic_ops:
        known = f"torch documents as deterministic only with --deterministic on: {row.deterministic_ops}"
        yield f"{known}; `--deterministic off` looks at them"


def _remedy(row: Row, *, ours: bool) -> str:
    """Return the advice for a difference, or for a failure of our own run."""
    if ours and (text := remedy(row)):
        return text
    if kind_of(row.accuracy).has_cause:
        return row.advice or "let the diagnosis look for the cause, with a --diagnose-budget above 0"
    status = status_of(row.accuracy)
    if not ours or status is None or row.origin == Origin.RANKS:  # an early read, whose error says what to do
        return ""
    return status.remedy


def _places(row: Row, folder: Path | None) -> Iterator[tuple[str, str]]:
    if folder is None:
        return
    log = ResultsFolder(folder).log_path(file_key(suite=row.suite, mode=row.mode, name=row.name))
    if row.repro:
        yield "repro: ", f"{folder / row.repro} ({row.reproduced})" if row.reproduced else str(folder / row.repro)
    elif row.traces and words_for(row) is None:  # of eager runs, which agree
        yield "traces: ", " ".join(str(folder / name) for name in row.traces.split())
    if log.exists():
        yield "log: ", str(log)


def _with_facts(columns: Sequence[str], attribute: str) -> list[str]:
    """Return columns with those of facts, each behind the one that its ``attribute`` names."""
    found = list(columns)
    for name, (_, _, column) in ROWS.columns.items():
        if (before := getattr(column, attribute)) in found:
            found.insert(found.index(before) + 1, name)
    return found


def _fitted(cells: dict[str, list[str]], width: int | None) -> dict[str, list[str]]:
    """Return the columns that fit into ``width``, cut to it."""
    cells = {column: texts for column, texts in cells.items() if any(texts)}
    if "cause" in cells:
        cells.pop("origin", None)
    if width is None:
        return cells
    narrow = {column: _cut(texts, _NARROWEST.get(column)) for column, texts in cells.items()}
    room = _with_facts(_WHERE_THERE_IS_ROOM, "yields_to")
    kept = [column for column in cells if column not in room]
    for column in filter(cells.__contains__, room):
        if column == "module" and "kernel" in cells.keys() - kept:
            continue  # both stand in the line below
        if _width({name: narrow[name] for name in (*kept, column)}) <= width:
            kept.append(column)
        elif column != "kernel":
            break
    cells = {column: texts for column, texts in cells.items() if column in kept}
    for column, narrowest in _NARROWEST.items():
        if column in cells and (over := _width(cells) - width) > 0:
            cells[column] = _cut(cells[column], max(narrowest, _column_width(column, cells[column]) - over))
    return cells


def _cut(texts: Sequence[str], width: int | None) -> list[str]:
    return [text if width is None else shorten(text, width) for text in texts]


def _width(cells: dict[str, list[str]]) -> int:
    return sum(_column_width(column, texts) + _GAP for column, texts in cells.items()) - _GAP


def _column_width(column: str, texts: Sequence[str]) -> int:
    return max(len(column) + _GAP, *map(len, texts))  # tabulate gives a header two characters more


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else one_line(str(value))


def _fill(text: str, width: int | None, *, indent: str = _INDENT) -> str:
    """Break ``text`` into lines between words; paths stay whole, so that they can be copied."""
    if width is None or not text:
        return f"{indent}{text}" if text else ""
    further = f"{indent}  " if indent else ""
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ------------------------------------------------------------------------------------------------- what is counted


def _notes(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yield why models were skipped, and remarks on passing ones; models with one reason share a line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for text in _remarks(row):
            reasons.setdefault((row.accuracy, text), []).append(one_line(row.name))
    for (status, reason), names in reasons.items():
        yield _fill(f"{len(names)} {status}: {reason} ({join_limited(names)})", width, indent="")


def _counts(rows: Sequence[Row], by_kind: dict[Kind, list[Row]], width: int | None, paint: Paint) -> str:
    """Return ``5 models in inference: 1 eager_two_runs_differ, 4 pass``; one status a line where that is too long."""
    modes = " and ".join(dict.fromkeys(row.mode for row in rows if row.mode))
    what = f"{count(len(rows), 'model')}{f' in {one_line(modes)}' if modes else ''}:"
    statuses = [
        (f"{number} {status}", kind)
        for kind, ones in by_kind.items()
        for status, number in Counter(row.accuracy for row in ones).most_common()
    ]
    long = width is not None and len(what) + sum(len(text) + 2 for text, _ in statuses) > width
    separator, between = ("\n" + _INDENT, "\n" + _INDENT) if long else (" ", ", ")
    return what + separator + between.join(paint(text, kind) for text, kind in statuses)


def _what_runs_prove(rows: Sequence[Row], more_runs: bool) -> str:
    """Return which differences equal runs can miss, and what finds more of them."""
    bounds = [(row.rate_high, row.runs) for row in rows if row.rate_high is not None and row.runs is not None]
    if not bounds:
        return ""
    high, runs = max(bounds)
    equal = "two runs were equal" if runs == 2 else f"{runs} runs were equal"
    text = f"Passed means: {equal}. That can miss a difference that shows in up to {percent(high)} of runs"
    confidence = "(95 % confidence)"
    least = percent(stats.rate_of(0, _MORE_RUNS - 1, distinct=1, of="runs").high)
    more = [f"`--runs {_MORE_RUNS}` misses none above {least}"] if more_runs and runs < _MORE_RUNS else []
    more += filter(None, (words.suggestion(rows) for words in all_words() if more))
    return f"{text} {confidence}{'; ' if more else ''}{', and '.join(more)}.{_not_as_the_program_runs(rows, more_runs)}"


def _not_as_the_program_runs(rows: Sequence[Row], flags: bool) -> str:
    """Return that models ran with deterministic algorithms, which are off where a program does not ask for them."""
    under = sum(row.deterministic not in ("", "off") for row in rows)
    if not under:
        return ""
    which = "They" if under == len(rows) else f"{under} of these {len(rows)} models"
    text = f" {which} ran with torch.use_deterministic_algorithms(True), not with the program's own setting"
    return f"{text}; torch's default is `--deterministic off`." if flags else f"{text}."
