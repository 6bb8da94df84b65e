"""A verdict as text for people, and as JSON. Names come from files, so what would steer a terminal is replaced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from hashbench.tools.pipeline.comparing import Finding, Verdict
from hashbench.tools.pipeline.stages import STAGES, UNSEEN

_WIDTH = max(map(len, STAGES)) + 2


def as_text(verdict: Verdict, *, first: str, second: str) -> str:
    """The stages, then why the first one differs and what to do, then the others that differ by themselves."""
    return "\n".join(_printable(line) for line in _lines(verdict, first, second))


def as_json(verdict: Verdict) -> str:
    """The same as one JSON document."""
    content = {
        "repeats": verdict.repeats,
        "first": verdict.first,
        "stages": [dataclasses.asdict(stage) for stage in verdict.stages],
        "findings": [
            {
                "stage": finding.stage.name,
                "reasons": [{**dataclasses.asdict(reason), "fix": reason.fix} for reason in finding.reasons],
            }
            for finding in verdict.findings
        ],
        "divergence": None if verdict.divergence is None else dataclasses.asdict(verdict.divergence),
    }
    return json.dumps(content, indent=1)


def _lines(verdict: Verdict, first: str, second: str) -> Iterator[str]:
    for stage in verdict.stages:
        yield f"{stage.name:<{_WIDTH}}{stage.status:<9}{stage.detail}".rstrip()
    yield ""
    if verdict.repeats:
        unseen = [stage.name for stage in verdict.stages if stage.status == UNSEEN]
        yield f"{first} and {second} agree{f', as far as was seen (not: {_joined(unseen)})' if unseen else ''}."
        return
    yield f"The first stage that differs between {first} and {second}: {verdict.first}"
    for finding in verdict.findings:
        yield from _finding_lines(finding, is_first=finding.stage.name == verdict.first)


def _finding_lines(finding: Finding, *, is_first: bool) -> Iterator[str]:
    if not is_first:
        yield ""
        yield f"Also, by itself: {finding.stage.name}"
    for reason in finding.reasons:
        yield f"  {reason.confidence}: {reason.name}, for {reason.because}"
        yield "  fix:"
        yield from (f"      {line}" for line in reason.fix.splitlines())


def _joined(names: list[str]) -> str:
    return ", ".join(names)


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
