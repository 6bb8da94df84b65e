"""The file of a recording: JSON lines, one for each optimizer step, each with its own checksum. Pure.

::

    {"line":"header","schema":2,"rank":0,"world_size":1,"model":"Net","parameter":["fc.weight"], … ,"checksum":"…"}
    {"line":"start","step":-1,"parameter":{"0":"5f…"}, … ,"checksum":"…"}
    {"line":"step","step":0,"batch":["91…"],"loss":["c4…"],"loss_value":[0.71],"parameter":{"0":"e0…"}, … }
    {"line":"final","step":99,"parameter":{"0":"77…"}, … ,"checksum":"…"}
    {"line":"end","steps":100,"ended":"","missed":[],"lines":104,"sum":"…","checksum":"…"}

``end`` checks the file as a whole: no line can be missing before it. A file without it is of a run that was killed.

``pandas.read_json(path, lines=True)`` reads it: one row a line, one column a part. ``docs/training.md`` has the fields.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, read_text
from hashbench.core.sealed import Sealed

SCHEMA = 2
"""Version of the lines; a file of another version is refused."""

PARTS = (
    *("batch", "generator", "scaler", "loss", "buffer", "gradient"),
    *("lr", "scheduler", "options", "parameter", "state"),
)
"""Parts of a step, in the order in which a step meets them."""

WHOLE = frozenset({"batch", "generator", "scaler", "loss", "lr", "scheduler", "options"})
"""Parts that are read completely in every step; the others by rotation."""

BY_TENSOR = ("buffer", "gradient", "parameter", "state")
"""Parts that hold a digest for each tensor read, by its index in the header."""

_NAME = re.compile(r"rank(?P<rank>\d+)\.jsonl")
_TRACE = re.compile(r"rank(?P<rank>\d+)\.steps(?P<first>\d+)-(?P<last>\d+)\.log\.gz")

_FILE = Sealed(SCHEMA, "steps of a training loop")

Values = Mapping[str, str]
"""Digests, or plain values as text, by name within a part."""


@dataclass(frozen=True, slots=True)
class WatchHeader:
    """What a recording says of its run.

    Attributes:
        schema: :data:`SCHEMA`.
        rank, world_size: of the process.
        start: number of the first step; ``None`` if the program did not say, and counting began at 0.
        every: in how many steps each tensor is read once, at the latest.
        model: class of the model.
        device: type of device of the parameters. Digests of different types of devices are never compared.
        parameter, buffer: names, by index.
        traced: first step that is traced and the one after the last; empty: none.
        command: command line of the process.
        versions: of hashbench, torch and Python.
        settings: torch's global settings when the recording began, by name.
        machine: instruction set, and threads between ops.
        environment: environment variables that decide how libraries compute.
    """

    schema: int
    rank: int
    world_size: int
    start: int | None
    every: int
    model: str
    device: str
    parameter: tuple[str, ...]
    buffer: tuple[str, ...]
    traced: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the model got it, by its largest tensor.

    Attributes:
        shape: of the tensor, whose first dimension is taken to count samples; empty: there is none.
        samples: a digest of each sample, in order; of many samples, of the share that :func:`is_kept` tells.
    """

    shape: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        number: of the step; -1 + the first step's for the state before it.
        parts: part -> name within it -> digest or value. A part that was not read is absent.
        losses: values of the loss, one for each backward pass; ``None`` where it is not finite or not known.
        complete: all tensors were read.
        begin: parameters, buffers and optimizer state as the step began with them, where ``every`` is 1: a program may
            change them after the step before (an average, a clamp). As ``parts``.
        batches: shapes and samples of the step's batches.
        settings: torch's global settings when the step began.
    """

    number: int
    parts: Mapping[str, Values]
    losses: tuple[float | None, ...] = ()
    complete: bool = False
    begin: Mapping[str, Values] = field(default_factory=dict)
    batches: tuple[Batch, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recording:
    """The steps of one rank.

    Attributes:
        path: of the file.
        header: of the file.
        steps: by number, consecutive.
        before: state before the first step; ``None`` if no step began.
        ended: how the run ended: empty if by itself, ``cut`` if the last line is missing, else an exception.
        optimizers: names of the parameters of each optimizer's groups, in its order, as they were at its first step,
            and again where they became others.
        final: all tensors as they were when the recording ended, numbered as its last step; ``None``: not read.
        missed: what was not recorded, each a phrase.
    """

    path: Path
    header: WatchHeader
    steps: Mapping[int, Step]
    before: Step | None = None
    ended: str = ""
    optimizers: Sequence[Sequence[Sequence[str]]] = ()
    final: Step | None = None
    missed: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------ reading


def ranks(folder: Path) -> dict[int, Path]:
    """Return the files of a recording's folder by rank.

    Raises:
        HashbenchError: there is none.
    """
    found = {}
    if folder.is_dir():
        found = {int(part["rank"]): path for path in folder.iterdir() if (part := _NAME.fullmatch(path.name))}
    if not found:
        raise HashbenchError(
            f"{folder} holds no recording of a training loop",
            consequence="nothing was compared",
            tip='Make one with `hashbench.watch("FOLDER", model=model)` around the loop.',
        )
    return dict(sorted(found.items()))


def traces(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return the traces of steps in a folder by rank, first and last step."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if part := _TRACE.fullmatch(path.name):
            found[int(part["rank"]), int(part["first"]), int(part["last"])] = path
    return dict(sorted(found.items()))


def trace_name(rank: int, first: int, last: int) -> str:
    """Return the name of the trace of these steps."""
    return f"rank{rank}.steps{first}-{last}.log.gz"


def read(path: Path) -> Recording:
    """Read the file of one rank. A last line that was cut is left out, and :attr:`Recording.ended` says so.

    Raises:
        HashbenchError: it is missing, no such file, of another schema, or damaged before its last line.
    """
    try:
        return _parse(read_text(path), path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"a line has no field {error}" if isinstance(error, KeyError) else str(error)
        raise _unreadable(path, reason) from error


def _unreadable(path: Path, reason: str) -> HashbenchError:
    return HashbenchError(f"cannot read the recording {path}", consequence=f"{reason}; nothing was compared")


def _parse(text: str, path: Path) -> Recording:
    documents, cut = _FILE.appended(text)
    if not documents:
        raise ValueError("it has no whole line: its run ended, or was killed, before its first step")
    header = _header(documents[0])
    steps: dict[int, Step] = {}
    names = {kind: [*getattr(header, kind)] for kind in ("parameter", "buffer")}
    starts: list[Step] = []
    final, end, optimizers = None, None, []
    options: dict[str, str] = {}
    unread: dict[str, str] = {}
    scheduler: dict[str, str] = {}
    in_force = dict(header.settings)
    for number, document in enumerate(documents[1:], start=2):
        if end is not None:
            raise ValueError(f"line {number} follows the last one")
        unread |= from_json(Mapping[str, str], document.get("unread", {}), where=f"line {number}: its unread")
        match document.get("line"):
            case "names":
                for kind, known in names.items():
                    known.extend(from_json(tuple[str, ...], document[kind], where=f"its {kind}"))
            case "start":
                starts.append(_step(document, names))
            case "order":
                order = from_json(tuple[tuple[int, ...], ...], document["order"], where=f"line {number}: its order")
                optimizers.append([[_named(names["parameter"], index) for index in group] for group in order])
            case "step":
                options = document.get("options", options)
                scheduler = {**scheduler, **document.get("scheduler", {})}
                carried = {"options": options, **({"scheduler": scheduler} if scheduler else {})}
                if "settings" in document:
                    in_force = in_force | from_json(
                        Mapping[str, str], document["settings"], where=f"line {number}: its settings"
                    )
                step = replace(_step({**document, **carried}, names), settings=in_force)
                if steps and step.number != next(reversed(steps)) + 1:
                    raise ValueError(f"line {number} is of step {step.number}, after step {next(reversed(steps))}")
                steps[step.number] = step
            case "final":
                final = _step(document, names)
            case "end":
                _check_end(document, text, number, len(steps))
                end = document
            case other:
                raise ValueError(f"line {number} is of an unknown kind, {other!r:.40}")
    before = _merged(starts)
    if steps and (before is None or not optimizers or next(iter(steps)) != before.number + 1):
        raise ValueError("lines were taken out of it: those before the first step")
    ended = "cut" if cut or end is None else str(end["ended"])
    missed = () if end is None else from_json(tuple[str, ...], end["missed"], where="its missed")
    missed = (*(f"{what} ({why})" for what, why in unread.items()), *missed)
    header = replace(header, parameter=tuple(names["parameter"]), buffer=tuple(names["buffer"]))
    return Recording(path, header, steps, before, ended, optimizers, final, missed)


def _check_end(end: Mapping[str, Any], text: str, number: int, steps: int) -> None:
    """Raise ``ValueError`` if lines before the last one, which has the ``number``, are missing or were exchanged."""
    begins = len(text) - len(text.split("\n", number - 1)[-1])
    if (end["lines"], end["steps"], end["sum"]) != (number - 1, steps, sum_of(hashlib.sha256(text[:begins].encode()))):
        raise ValueError(
            f"lines were taken out of it: its end counts {end['lines']} lines and {end['steps']} steps, "
            f"it holds {number - 1} and {steps}"
        )


def sum_of(running: Any) -> str:
    """Return the checksum of the text before the last line, of a SHA-256 over it: 16 digits."""
    digits: str = running.hexdigest()[:16]
    return digits


def _header(document: Mapping[str, Any]) -> WatchHeader:
    if document.get("line") != "header":
        raise ValueError(f"it holds no {_FILE.what}: its first line is no header")
    _FILE.refuse_other_schema(document)
    fields = {name: value for name, value in document.items() if name not in ("line", "checksum")}
    return from_json(WatchHeader, fields, where="its header")


Names = Mapping[str, Sequence[str]]
"""Kind of tensor -> names, by index; of those that join the model later as well."""


def _step(document: Mapping[str, Any], names: Names) -> Step:
    losses = from_json(tuple[float | None, ...], document.get("loss_value", []), where="its loss_value")
    parts, begin = (
        {part: dict(_values(part, read[part], names)) for part in PARTS if part in read}
        for read in (document, from_json(Mapping[str, object], document.get("begin", {}), where="its begin"))
    )
    number = from_json(int, document["step"], where="its step")
    samples = from_json(tuple[str, ...], document.get("samples", []), where="its samples")
    complete = bool(document.get("complete"))
    return Step(number, parts, losses, complete=complete, begin=begin, batches=tuple(map(_batch, samples)))


_BATCH = re.compile(r"(?P<shape>(\d{1,15}(x\d{1,15})*)?)( (?P<samples>([0-9a-f]{8})+))?")


def _batch(text: str) -> Batch:
    found = _BATCH.fullmatch(text)
    if found is None:
        raise ValueError(f"its samples hold no batch, but {text!a:.40}")
    digits = found["samples"] or ""
    samples = tuple(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    return Batch(tuple(map(int, found["shape"].split("x"))) if found["shape"] else (), samples)


_MOST_SAMPLES = 32
"""Samples of a batch of which all have a digest in the file; of more about as many."""


def is_kept(digest: int, samples: int) -> bool:
    """Return True if the digest of a sample is kept, in a batch of so many samples.

    It depends on the digest alone, so that both runs keep the same ones, whatever their order; and what a large batch
    keeps, a smaller one keeps as well.
    """
    return digest % share_kept(samples) == 0


def share_kept(samples: int) -> int:
    """Return of how many samples a batch of so many keeps one, about: a power of two."""
    share = 1
    while share * _MOST_SAMPLES < samples:
        share *= 2
    return share


def _merged(starts: Sequence[Step]) -> Step | None:
    """Return the state before the first step, of which several optimizers have a line each; ``None``: there is none."""
    if len(starts) < 2:
        return starts[0] if starts else None
    parts: dict[str, dict[str, str]] = {}
    for start in starts:
        for part, values in start.parts.items():
            if values:
                parts.setdefault(part, {}).update(values)
    return Step(starts[0].number, parts, complete=starts[0].complete)


def _values(part: str, content: Any, names: Names) -> Iterator[tuple[str, str]]:
    if part == "state":
        for key, tensors in from_json(Mapping[str, Mapping[str, object]], content, where=f"its {part}").items():
            for index, digest in tensors.items():
                yield f"{_named(names['parameter'], index)}: {key}", str(digest)
    elif part in BY_TENSOR:
        known = names["buffer" if part == "buffer" else "parameter"]
        for index, digest in from_json(Mapping[str, object], content, where=f"its {part}").items():
            yield _named(known, index), str(digest)
    elif isinstance(content, dict):
        yield from ((str(name), str(value)) for name, value in content.items())
    else:
        yield from ((str(index), str(value)) for index, value in enumerate(content))


def _named(names: Sequence[str], index: str | int) -> str:
    number = int(index)
    if not 0 <= number < len(names):
        raise ValueError(f"a tensor has the index {number}, of {len(names)}")
    return names[number]


# ------------------------------------------------------------------------------------------------------ writing


def line(kind: str, content: Mapping[str, Any]) -> str:
    """Return one line of the file, with its checksum and its line feed."""
    return _FILE.line({"line": kind, **content})
