"""Report on the runs of a program. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from hashbench.core.divergence.text import divergence_facts, place
from hashbench.core.finding import Finding, few
from hashbench.core.io import to_json
from hashbench.core.text import count, listed, percent, shorten
from hashbench.core.trace.step_file import rank_path
from hashbench.extensions.watch.compare import range_words
from hashbench.extensions.watch.file import PARTS
from hashbench.extensions.watch.program.compare import RunsVerdict, TextDifference, lines_of
from hashbench.extensions.watch.program.launch import ProgramRun
from hashbench.extensions.watch.program.looks import ExplainedText, ProgramVerdict
from hashbench.extensions.watch.text import NAMES, first_step_words, meaning_of, part_words

_LONGEST = 100
"""Characters shown of a line."""


def finding_of(verdict: ProgramVerdict, *, kept: bool) -> Finding:
    """Return the report of the runs of a program.

    Args:
        verdict: on the runs.
        kept: their recordings are kept, so that further commands can read them.
    """
    compared = any(True for _ in _compared(verdict))
    equal = not verdict.differs and compared and not verdict.lead.gaps and is_whole(verdict)
    return Finding(
        headline=_headline(verdict),
        facts=tuple(_facts(verdict)),
        notes=tuple(filter(None, _notes(verdict))),
        next=tuple(_next(verdict, kept=kept)),
        equal=equal,
        differs=verdict.differs,
        data=_document(verdict),
    )


def is_whole(verdict: ProgramVerdict) -> bool:
    """Return True if the runs came to an end of their own."""
    return not any(run.timed_out for pair in verdict.pairs for run in (pair.first, pair.second))


def _headline(verdict: ProgramVerdict) -> str:
    lead = verdict.lead
    if not verdict.differs:
        return _equal_words(verdict)
    if verdict.named is not None:
        return f"The runs differ: {place(verdict.named.divergence)}"
    if lead.loop is not None and lead.loop.first is not None:
        first = lead.loop.first
        return f"The runs differ from {first_step_words(first)} on: {part_words(first.differing[0])}"
    if lead.lengths_differ:
        steps = [count(run.end.steps, "step") for run in (lead.first, lead.second) if run.end is not None]
        return f"The runs differ in length: {steps[0]} and {steps[1]}"
    if lead.ends_differ:
        return f"The runs end differently: {_end_words(lead.first)}, and {_end_words(lead.second)}"
    return f"The runs differ in {_text_words(verdict.texts[0])}"


def _equal_words(verdict: ProgramVerdict) -> str:
    runs = count(len(verdict.pairs) + 1, "run")
    compared = listed(list(_compared(verdict)))
    first = verdict.lead.first
    how = f"; all {_end_words(first)}" if first.ended() and is_whole(verdict) else ""
    if not compared:
        return f"Nothing was compared: the program printed nothing and ran no kernel{how}"
    if not is_whole(verdict):
        return f"The {runs} agree until they were stopped: {compared}"
    equal = "agree, and not all was compared" if verdict.lead.gaps else "are equal"
    return f"The {runs} {equal}: {compared}{how}"


def _compared(verdict: ProgramVerdict) -> Iterator[str]:
    """Yield what was compared, in words."""
    lead = verdict.lead
    if lines := lines_of(lead.first.folder):
        yield count(lines, "printed line")
    if lead.loop is not None:
        rank = lead.loop.ranks[0]
        parts = [NAMES[part] for part in PARTS if any(part in seen for seen in rank.seen.values())]
        yield f"{count(len(rank.steps), 'step')} ({', '.join(parts)})"
    if lead.kernels:
        yield f"{count(lead.kernels, 'kernel')} of {_traced_words(verdict)}"
    if written := [name for name, content in lead.first.files if content is not None]:
        yield count(len(written), "file")


def _traced_words(verdict: ProgramVerdict) -> str:
    lead = verdict.lead
    if lead.loop is None:
        return "the program"
    traced = min(verdict.request.first_steps, len(lead.loop.ranks[0].steps))
    return "the first step" if traced == 1 else f"the first {traced} steps"


def _facts(verdict: ProgramVerdict) -> Iterator[tuple[str, str]]:
    lead = verdict.lead
    if lead.ends_differ:
        yield "first run ended", _end_words(lead.first).removeprefix("ended ")
        yield "second run ended", _end_words(lead.second).removeprefix("ended ")
    elif verdict.differs and lead.first.ended():
        yield "all runs ended", _end_words(lead.first).removeprefix("ended ")
    if verdict.named is not None:
        yield from divergence_facts(verdict.named.divergence)
    first = None if lead.loop is None else lead.loop.first
    if first is not None:
        yield "first step", first_step_words(first)
        yield "what differs there", few([part_words(part) for part in first.differing])
    for text in verdict.texts if verdict.differs else ():
        yield from _text_facts(text)
    note = verdict.note
    if note is not None:
        yield "replays", note.words
        if note.cause:
            yield "cause", f"{note.cause}, {note.confidence}: {note.because}"
            yield "advice", note.advice


def _end_words(run: ProgramRun) -> str:
    if run.status < 0:
        return run.ended()  # killed by a signal
    return f"ended with {run.ended()}" if run.ended() else "ended by itself"


def _text_words(text: TextDifference) -> str:
    name = text.name or "printed output"
    return f"{name}, line {text.lines[0].number}" if text.lines else name


def _text_facts(text: TextDifference) -> Iterator[tuple[str, str]]:
    name = text.name or "printed"
    if not text.lines:
        yield name, text.words
        return
    line = text.lines[0]
    more = f" (and {count(text.total - 1, 'more line')})" if text.total > 1 else ""
    yield f"{name} line {line.number}", f"{_shown(line.first)}{more}"
    yield "in second run", _shown(line.second)


def _shown(line: str | None) -> str:
    return "nothing: the output has ended" if line is None else shorten(repr(line)[1:-1], _LONGEST) or "an empty line"


def _notes(verdict: ProgramVerdict) -> Iterator[str]:
    lead = verdict.lead
    yield from lead.gaps
    yield from map(_explained_words, verdict.explained)
    yield from _look_notes(verdict)
    if verdict.request.why and verdict.note is None and verdict.differs:
        yield "No call was replayed: no kernel is where the difference entered."
    first = None if lead.loop is None else lead.loop.first
    if first is not None and (verdict.named is None or not verdict.named.made):
        yield meaning_of(first)
    yield _rate_note(verdict)
    if not verdict.differs and lead.traced is not None and lead.traced.benign:
        words = count(len(lead.traced.benign), "kernel")
        yield (
            f"{words} wrote other bytes in the second run, which reached nothing that was compared: "
            + few(lead.traced.benign)
            + "."
        )
    if lead.loop is not None and lead.loop.first is None:
        yield from _gaps(lead)
    yield _unseen_words(verdict)


def _gaps(lead: RunsVerdict) -> Iterator[str]:
    """Yield what was not compared of the steps, with words for the folders; not how both runs ended."""
    names = {str(lead.first.folder): "the first run", str(lead.second.folder): "the second run"}
    for rank in lead.loop.ranks if lead.loop is not None else ():
        for gap in rank.gaps:
            if gap.startswith("The watched model was not called"):
                yield "No module was called in training: batches were not compared, only what follows from them."
            elif not any(gap.startswith(f"{folder} ended after") for folder in names):
                for folder, words in names.items():
                    gap = gap.replace(folder, words)
                yield gap[:1].upper() + gap[1:]


def _explained_words(explained: ExplainedText) -> str:
    text, shows = explained.text, explained.shows
    where = f"{text.name} shows" if text.name else "Printed output shows"
    if text.lines:
        line = text.lines[0]
        of = f" of {text.name}" if text.name else ""
        lines = f"line {line.number}{of}" + (f" (and {count(text.total - 1, 'more')})" if text.total > 1 else "")
        where = f"Printed {lines} shows" if not text.name else f"{lines.capitalize()} shows"
        where += f" {shows}: {_shown(line.first)} / {_shown(line.second)}."
    else:
        where += f" {shows}."
    same = "With fixed clocks, process numbers and temporary names, and without addresses of objects"
    return f"{where} {same}, both runs write the same."


def _look_notes(verdict: ProgramVerdict) -> Iterator[str]:
    look = verdict.look
    if look is None:
        return
    steps = range_words(range(look.first, look.stop))
    pairs = count(len(look.pairs), "further pair")
    if verdict.named is None:
        yield (
            f"The second look traced {steps} in {pairs} of runs, of which {look.differing} differ: no kernel was seen "
            "to differ, so none is named. Run it again, or with more --runs for the rate."
        )
    elif not verdict.named.made:
        yield f"The difference was there when the trace of {steps} began: it was made before."
    else:
        yield f"Named by a second look, at {steps}: {look.differing} of {pairs} of runs differ."


def _rate_note(verdict: ProgramVerdict) -> str:
    differing, total = sum(pair.differs for pair in verdict.pairs), len(verdict.pairs)
    if total < 2 or not verdict.differs:
        return ""
    return f"{differing} of {total} runs differ from the first ({percent(differing / total)})."


def _unseen_words(verdict: ProgramVerdict) -> str:
    """Say what was not compared."""
    lead, unseen = verdict.lead, ["standard error"]
    end = lead.first.end
    if end is None:
        return (
            "The program did not come to the end of its script: digests of its last second, and the trace of its last "
            f"step, may be missing. Not compared: {listed(unseen)}."
        )
    if not end.torch:
        return (
            "The program did not import torch: only what it printed"
            + (" and the named files were" if lead.first.files else " was")
            + " compared. Name files that it writes with --compare-file."
        )
    if not lead.first.files:
        unseen.append("files that it writes (--compare-file)")
    unseen.append("tensors of child processes")
    if end.bounded:
        return (
            f"The trace ended after {verdict.request.most} kernels: of later ones only what the program printed was "
            f"compared. Not compared: {listed(unseen)}."
        )
    return f"Not compared: {listed(unseen)}."


def _next(verdict: ProgramVerdict, *, kept: bool) -> Iterator[str]:
    named = verdict.named
    if named is None:
        return
    if kept:
        yield shlex.join(["hashbench", "diff", *(str(rank_path(folder, 0)) for folder in named.traces)])
    if verdict.note is None and named.divergence.origin == "kernel":
        yield shlex.join(["hashbench", "run", "--why", *_command(verdict)])


def _command(verdict: ProgramVerdict) -> list[str]:
    program = verdict.request.program
    return [*(["-m"] if program.module else []), program.script, *program.arguments]


def _document(verdict: ProgramVerdict) -> dict[str, Any]:
    lead, named = verdict.lead, verdict.named
    first = None if lead.loop is None else lead.loop.first
    return {
        "program": to_json(verdict.request.program),
        "runs": len(verdict.pairs) + 1,
        "differing_runs": sum(pair.differs for pair in verdict.pairs) if verdict.differs else 0,
        "ends": [run.ended() for run in (lead.first, *(pair.second for pair in verdict.pairs))],
        "divergence": None if named is None else to_json(named.divergence),
        "step": None if first is None else first.step,
        "differing": [] if first is None else to_json(first.differing),
        "texts": to_json(verdict.texts) if verdict.differs else [],
        "explained": to_json(verdict.explained),
        "second_look": None if verdict.look is None else _look_document(verdict),
        "replays": None if verdict.note is None else to_json(verdict.note),
    }


def _look_document(verdict: ProgramVerdict) -> dict[str, Any]:
    look = verdict.look
    assert look is not None
    return {"steps": [look.first, look.stop], "pairs": len(look.pairs), "differing": look.differing}
