"""A night as workflow commands of GitHub Actions: ``::error title=…::…`` lines, which GitHub shows on the run's page.

GitHub shows ten errors and ten warnings of a step; what is more is summed up in the last of them.
https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hashbench.catalog import kind_of
from hashbench.report.describe import change, message
from hashbench.report.expectations import ExpectationStatus, Judged, Judgement
from hashbench.text import one_line, shorten

MOST = 10
"""Annotations of one level that GitHub shows of a step."""

_LONGEST = 1000


def as_annotations(judged: Judged) -> str:
    """An error for everything that got worse; a warning for what does not pass and nothing is expected of, for stale
    expectations, and for a changed environment. Empty where there is nothing to say."""
    errors = [_annotation("error", "The night is not whole", problem) for problem in judged.problems]
    errors += [_model("error", one) for one in judged.judgements if one.worse]
    warnings = [_model("warning", one) for one in judged.judgements if _asks_for_attention(one)]
    if judged.environment:
        changes = "; ".join(map(change, judged.environment))
        warnings.insert(0, _annotation("warning", "The environment changed", changes))
    worse = Counter(one.word for one in judged.judgements if one.worse)
    return "".join(
        f"{line}\n" for line in (*_at_most(errors, "error", _counted(worse)), *_at_most(warnings, "warning", ""))
    )


def _asks_for_attention(one: Judgement) -> bool:
    if one.worse:
        return False
    passes = one.new is None or kind_of(one.new.accuracy).is_fine
    return one.status is ExpectationStatus.STALE or (one.status is ExpectationStatus.UNEXPECTED and not passes)


def _at_most(lines: Sequence[str], level: str, counts: str) -> Iterator[str]:
    if len(lines) <= MOST:
        yield from lines
        return
    yield from lines[: MOST - 1]
    more = f"{len(lines) - MOST + 1} more {level}s of hashbench"
    yield _annotation(level, more, f"{more} are in the report.{f' In all: {counts}.' if counts else ''}")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _model(level: str, one: Judgement) -> str:
    suite, mode, *_, name = one.key
    return _annotation(level, f"{name} ({suite}, {mode}): {one.word}", message(one))


def _annotation(level: str, title: str, text: str) -> str:
    return f"::{level} title={_property(shorten(one_line(title), 200))}::{_data(shorten(one_line(text), _LONGEST))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
