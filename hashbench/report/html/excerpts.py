"""What two traces say around their divergence, as plain data: the steps side by side, and the modules around them.

The only part of the HTML report that opens files. Traces are named by rows, which somebody may have sent: a path that
leads out of its sweep folder is not followed, and what the files hold is checked against the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hashbench.divergence.align import Pair, align
from hashbench.errors import HashbenchError
from hashbench.records import OpRecord, Row, TensorDigest, Trace
from hashbench.report.history import History, ModelHistory, models_in_trouble
from hashbench.trace import file as tracefile

EXCERPTS = 150
"""Models whose traces are read at most, the newest trouble first."""

TRACE_MIB = 48.0
"""MiB of traces that are read at most for one report: reading takes a fifth of a second per MiB."""

CONTEXT = 3
"""Steps that are shown before and after the divergence."""

_TOKENS = 8
_TEXT = 160
_SIBLINGS = 4


class Token(NamedTuple):
    """One word of a step: a tensor that was read or written, or another fact. ``differs``: the runs disagree on it."""

    text: str
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """What one run did in a step."""

    reads: tuple[Token, ...] = ()
    writes: tuple[Token, ...] = ()
    facts: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A record of the first run and the one of the second that corresponds to it; ``None`` where a run has none.
    ``position`` counts the steps of both runs from 0. ``here`` marks the divergence."""

    position: int
    op: str
    phase: str
    iteration: int
    module: str
    first: Side | None
    second: Side | None
    same: bool
    here: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of the module tree: its ``depth``, how many ``steps`` ran in the module and below it, and how many of
    them are ``differing``. ``folded`` counts siblings that one line stands for, whose ``name`` is then empty."""

    depth: int
    name: str
    steps: int = 0
    differing: int = 0
    here: bool = False
    folded: int = 0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The steps around a divergence and the module tree around its module. ``total`` counts all steps. ``missing`` says
    why there is nothing to show (empty: there is). ``folder`` is the sweep's (empty: it was not found)."""

    steps: tuple[Step, ...] = ()
    tree: tuple[Branch, ...] = ()
    total: int = 0
    missing: str = ""
    folder: str = ""


# ------------------------------------------------------------------------------------------------- from disk


def read_excerpts(history: History, *, limit: int = EXCERPTS, mib: float = TRACE_MIB) -> dict[tuple[str, ...], Excerpt]:
    """Model key → excerpt, for the models whose rows name traces. Nothing is raised: that a trace is missing, damaged
    or of other runs is what the excerpt then says."""
    found: dict[tuple[str, ...], Excerpt] = {}
    left = mib * 2**20
    for index in models_in_trouble(history):
        model = history.models[index]
        if model.trouble is None or not model.trouble.traces:
            continue
        if len(found) >= limit:
            break
        try:
            folder, files = _trace_files(history, model)
            size = sum(file.stat().st_size for file in files)
        except OSError as error:
            found[model.key] = Excerpt(missing=f"The traces cannot be shown: {error}")
            continue
        excerpt = _read(files, model.trouble) if size <= left else Excerpt(missing=_too_large(size))
        left -= size if size <= left else 0
        found[model.key] = replace(excerpt, folder=folder)
    return found


def _too_large(size: int) -> str:
    return f"The traces ({size / 2**20:.1f} MiB) are too large to be read for this page; hashbench diff shows them."


def _trace_files(history: History, model: ModelHistory) -> tuple[str, tuple[Path, ...]]:
    """The first folder of the night that has both trace files, and these; nothing where none has."""
    if model.trouble is None or model.trouble_night is None:
        return "", ()
    for folder in _sweep_folders(history.nights[model.trouble_night].folder, model.trouble):
        files = tuple(_inside(folder, name) for name in model.trouble.traces.split())
        if len(files) == 2 and all(file is not None for file in files):
            return str(folder), tuple(file for file in files if file is not None)
    return "", ()


def _sweep_folders(night: Path, row: Row) -> list[Path]:
    """Where the sweep of a row may lie in its night's folder, the likeliest first."""
    if not night.is_dir():
        return [night.parent]
    folders = [night, *sorted(folder for folder in night.iterdir() if folder.is_dir())]
    suite = Path(row.suite).stem
    return sorted(folders, key=lambda folder: (not folder.name.startswith(f"{suite}_{row.mode}"), folder != night))


def _inside(folder: Path, name: str) -> Path | None:
    """The file of that name, if it is there and really in the folder."""
    try:
        path = (folder / name).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _read(files: Sequence[Path], row: Row) -> Excerpt:
    if len(files) != 2:
        return Excerpt(missing=f"The traces are not in the sweep's folder any more ({row.traces}).")
    try:
        first, second = map(tracefile.read, files)
    except HashbenchError as error:
        return Excerpt(missing=f"The traces cannot be shown: {error}")
    return excerpt_of(first, second, row)


# --------------------------------------------------------------------------------------------------- decided


def excerpt_of(first: Trace, second: Trace, row: Row, *, context: int = CONTEXT) -> Excerpt:
    """The excerpt of two traces around the op that ``row`` blames."""
    pairs = align(first.records, second.records)
    here = next((place for place, (a, _) in enumerate(pairs) if a is not None and a == row.op_index), None)
    if here is None:
        return Excerpt(missing="The difference entered at no op of the first run, so there is no place to show.")
    record = first.records[row.op_index or 0]
    if row.kernel not in ("", record.op) or row.module not in ("", record.module):
        return Excerpt(missing=f"The traces are of other runs: op {row.op_index} is {record.op}, not {row.kernel}.")
    views = _View(first), _View(second)
    steps = [_step(place, pair, views, here=place == here) for place, pair in enumerate(pairs)]
    shown = steps[max(0, here - context) : here + context + 1]
    return Excerpt(steps=tuple(shown), tree=module_tree(steps, row.module), total=len(steps))


class _View:
    """A trace, and what each of its writers left."""

    def __init__(self, trace: Trace) -> None:
        self.records = trace.records
        self.left: dict[str, str] = {leaf.id: leaf.digest.value for leaf in trace.leaves}
        self.left |= {record.id: tracefile.short_digest(record.outputs) for record in trace.records if record.outputs}

    def side(self, index: int | None) -> tuple[Mapping[str, str], tuple[TensorDigest, ...], Mapping[str, str]] | None:
        """What a record read by argument, what it wrote, and its other facts."""
        if index is None:
            return None
        record = self.records[index]
        reads = {ref.argument: f"{_short(ref.source)} {self._content(ref.source, ref.digest)}" for ref in record.inputs}
        return reads, record.outputs, _facts(record)

    def _content(self, source: str, digest: str) -> str:
        return (digest or self.left.get(source, ""))[:16]


def _facts(record: OpRecord) -> dict[str, str]:
    facts = {"arguments": record.arguments, "returned": record.scalar, "generator": record.rng}
    return {name: text for name, text in facts.items() if text}


def _short(source: str) -> str:
    """The name of a writer without phase, iteration and module, which its own step shows."""
    return source.rpartition("/")[2] if "." in source.partition("/")[0] else source


def _step(place: int, pair: Pair, views: tuple[_View, _View], *, here: bool) -> Step:
    contents = [view.side(index) for view, index in zip(views, pair, strict=True)]
    record = next(view.records[index] for view, index in zip(views, pair, strict=True) if index is not None)
    same = contents[0] == contents[1]
    sides = [_side(one, other) for one, other in (contents, contents[::-1])]
    return Step(
        place, record.op, record.phase, record.iteration, record.module, sides[0], sides[1], same=same, here=here
    )


_Content = tuple[Mapping[str, str], tuple[TensorDigest, ...], Mapping[str, str]] | None


def _side(one: _Content, other: _Content) -> Side | None:
    if one is None:
        return None
    reads, writes, facts = one
    both = other is not None
    other_reads, other_writes, other_facts = other or ({}, (), {})
    return Side(
        reads=_few(Token(f"{name} ← {text}", both and other_reads.get(name) != text) for name, text in reads.items()),
        writes=_few(
            Token(tracefile.digest_text(digest), both and other_writes[place : place + 1] != (digest,))
            for place, digest in enumerate(writes)
        ),
        facts=_few(Token(f"{name} {text}", both and other_facts.get(name) != text) for name, text in facts.items()),
    )


def _few(tokens: Iterator[Token]) -> tuple[Token, ...]:
    """At most a few tokens of moderate length; among those that are left out, one that differs is said to."""
    kept = [Token(text if len(text) <= _TEXT else f"{text[:_TEXT]}…", differs) for text, differs in tokens]
    rest = kept[_TOKENS:]
    if rest:
        return (*kept[:_TOKENS], Token(f"and {len(rest)} more", any(token.differs for token in rest)))
    return tuple(kept)


# ---------------------------------------------------------------------------------------------- module tree


def module_tree(steps: Sequence[Step], module: str) -> tuple[Branch, ...]:
    """The path from the model down to ``module``, at each level with its nearest siblings, and what is below it."""
    counts: dict[str, list[int]] = {}
    for step in steps:
        for name in _upwards(step.module):
            count = counts.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += not step.same
    return tuple(_branches(counts, _upwards(module), "", 0))


def _upwards(path: str) -> list[str]:
    """``a.b.c`` → ``a``, ``a.b``, ``a.b.c``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _branches(counts: Mapping[str, Sequence[int]], path: Sequence[str], parent: str, depth: int) -> Iterator[Branch]:
    names = [name for name in counts if name.rpartition(".")[0] == parent]
    at = names.index(path[depth]) if depth < len(path) and path[depth] in names else None
    low = 0 if at is None else max(0, at - _SIBLINGS)
    high = (0 if at is None else at + 1) + _SIBLINGS
    if low:
        yield _folded(counts, names[:low], depth)
    for place in range(low, min(high, len(names))):
        name = names[place]
        here = place == at and depth == len(path) - 1
        steps, differing = counts[name]
        yield Branch(depth, name.rpartition(".")[2], steps, differing, here=here)
        if place == at:
            yield from _branches(counts, path, name, depth + 1)
    if names[high:]:
        yield _folded(counts, names[high:], depth)


def _folded(counts: Mapping[str, Sequence[int]], names: Sequence[str], depth: int) -> Branch:
    steps, differing = (sum(counts[name][place] for name in names) for place in (0, 1))
    return Branch(depth, "", steps, differing, folded=len(names))
