"""Text form of a trace, made for ``diff -u``: written atomically, validated when read, gzip-compressed in files named
``.gz``.

``docs/trace.md`` explains the fields. Equal runs give equal files, byte for byte. A changed op changes its own line and
the lines of its readers, because a line shows, beside the name of every writer it reads from, the first digits of that
writer's digest. The first line names the tracer. A ``setting`` line holds all global settings of torch at first, later
only changes; a ``leaf`` has ``was=`` if its digest was another at the start of the run; notes follow ``;``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import xxhash

from hashbench.core.errors import HashbenchError
from hashbench.core.io import GZIP, LARGEST_FILE, bytes_for, open_file, read_text, replace_bytes
from hashbench.core.processes import uncollected
from hashbench.core.records import (
    TRACE_SCHEMA,
    TRACERS,
    Collective,
    EarlyRead,
    Leaf,
    OpRecord,
    Ref,
    Result,
    SettingsMark,
    TensorDigest,
    Trace,
    TracedRank,
    TracedStep,
    contiguous_stride,
    layout_text,
)

OTHER_OPS = "the Python dispatch mode changes which ops run, and the native tracer does not"
"""Reason for not comparing traces of different tracers."""

CUT = "trace is cut"
"""How a rank ended whose file has no end."""

_Positioned = TypeVar("_Positioned", Leaf, SettingsMark, TracedStep)
_MAGIC = "hashbench-trace"
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", " ": "\\s"}
_SPECIAL = re.compile(r"[\\\t\n\r ]")
_UNESCAPES = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r", "s": " "}
_NOTE = "; "
_CONTRIBUTED_BEFORE = "given"
"""Name of ``contributed`` in older files."""
_CLOSED_STEP = re.compile(r"\nstep\t\d{1,20}\t(\d{1,20})\t([0-9a-f]{16})\n")
_BLANK = "blank"
_MOST_DIMENSIONS, _MOST_DIGITS = 256, 20
_LEAST_GZIP = 18


# ------------------------------------------------------------------------------------------------------ writing


def dumps(trace: Trace, *, notes: Mapping[int, str] | None = None) -> str:
    """Format a trace as text. ``notes`` by record index are appended to their lines, and ignored when read."""
    text = TraceText(trace)
    text.add(trace, notes=notes or {})
    text.end(trace.results, trace.early_reads, ended=trace.rank.ended if trace.rank is not None else "")
    return text.taken()


class SealedLines:
    """Text in the making, whose closing lines have the number of lines before them and the checksum of all text so far.

    Attributes:
        count: number of lines so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._new: list[str] = []
        self._hashed = 0  # number of the new pieces that the checksum has
        self._hash = xxhash.xxh3_64()
        self._kept = 0, self._hash.copy()

    def add(self, line: str) -> None:
        """Add a line."""
        self.count += 1
        self._new.append(line + "\n")

    def close(self, words: str) -> None:
        """Add a closing line: these words, the number of lines, the checksum."""
        self._update()
        self.add(f"{words}\t{self.count}\t{self._hash.hexdigest()}")

    def new(self) -> str:
        """Return the text since the last :meth:`keep`."""
        return "".join(self._new)

    def keep(self) -> None:
        """Go on behind the text so far."""
        self._update()
        self._new.clear()
        self._hashed = 0
        self._kept = self.count, self._hash.copy()

    def drop(self) -> None:
        """Go on as if nothing had been added since the last :meth:`keep`."""
        self._new.clear()
        self._hashed = 0
        self.count, kept = self._kept
        self._hash = kept.copy()

    def _update(self) -> None:
        self._hash.update("".join(self._new[self._hashed :]).encode())
        self._hashed = len(self._new)


class TraceText:
    """Text form of a trace in the making, from its first line on; ``head`` is a trace with the fields of that line.

    Attributes:
        lines: the lines so far.
    """

    def __init__(self, head: Trace) -> None:
        self.lines = SealedLines()
        self._writers: dict[str, str] = {}  # as their readers' lines show them
        self._settings: dict[str, str] = {}
        self.lines.add("\t".join([_MAGIC, str(TRACE_SCHEMA), *_head(head)]))

    def add(
        self,
        trace: Trace,
        *,
        first: int = 0,
        notes: Mapping[int, str] = MappingProxyType({}),
        arrived: Mapping[str, tuple[TensorDigest, ...]] = MappingProxyType({}),
    ) -> None:
        """Add the records of a trace, or of the part of one that begins with record ``first``, with leaves, marks and
        steps; and digests that have ``arrived`` since an earlier part, by the ids of their records."""
        for identity, digests in arrived.items():
            self._writers[identity] = writer_text(identity, short_digest(digests))
            self.lines.add("\t".join(["arrived", _escape(identity), " ".join(map(digest_text, digests))]))
        marks, leaves, steps = _by_position(trace.marks), _by_position(trace.leaves), _by_position(trace.steps)
        writers = self._writers
        for number, record in enumerate(trace.records, first):
            if number in steps or number in marks or number in leaves:
                self._add_between(steps.get(number, ()), marks.get(number, ()), leaves.get(number, ()))
            line = record_line(record, writers)
            self.lines.add(f"{line}\t{_NOTE}{_escape(notes[number], spaces=False)}" if notes.get(number) else line)
            if record.outputs:
                writers[record.id] = writer_text(record.id, short_digest(record.outputs))
        end = first + len(trace.records)
        self._add_between(steps.get(end, ()), marks.get(end, ()), leaves.get(end, ()))

    def _add_between(self, steps: Iterable[TracedStep], marks: Iterable[SettingsMark], leaves: Iterable[Leaf]) -> None:
        """Add what lies before a record."""
        for step in steps:
            self.close_step(step.number, step.results)
        for mark in marks:
            self.lines.add(self._mark_line(mark))
        for leaf in leaves:
            self.lines.add(self._leaf_line(leaf))

    def close_step(self, number: int, results: Iterable[Result], early: Iterable[EarlyRead] = ()) -> None:
        """Add the results of a step, and the line that closes it."""
        self._add_results(results, early)
        self.lines.close(f"step\t{number}")

    def end(self, results: Iterable[Result], early: Iterable[EarlyRead] = (), *, ended: str = "") -> None:
        """Add the results at the end, and the last lines."""
        self._add_results(results, early)
        if ended:
            self.lines.add(f"ended\t{_escape(ended, spaces=False)}")
        self.lines.close("end")

    def taken(self) -> str:
        """Return the text since the last call."""
        text = self.lines.new()
        self.lines.keep()
        return text

    def _add_results(self, results: Iterable[Result], early: Iterable[EarlyRead]) -> None:
        for result in results:
            self.lines.add(_result_line(result))
        for read in early:
            by = "result" if read.is_result else "op"
            fields = ["early", _escape(read.collective), by, _escape(read.reader), _escape(read.source, spaces=False)]
            self.lines.add("\t".join(fields))

    def _mark_line(self, mark: SettingsMark) -> str:
        changed = {name: value for name, value in mark.settings if self._settings.get(name) != value}
        gone = {name: None for name in self._settings if name not in dict(mark.settings)}
        self._settings = dict(mark.settings)
        values = json.dumps({**changed, **gone}, sort_keys=True)
        return f"setting\t{mark.position}\t{_escape(mark.label)}\t{values}"

    def _leaf_line(self, leaf: Leaf) -> str:
        self._writers[leaf.id] = writer_text(leaf.id, leaf.digest.value[:8] or _BLANK)
        initial = f"\twas={leaf.initial}" if leaf.initial else ""
        return f"leaf\t{_escape(leaf.id)}\t{leaf.kind}\t{digest_text(leaf.digest)}{initial}"


def write(trace: Trace, path: Path, *, notes: Mapping[int, str] | None = None) -> None:
    """Write the text form to ``path`` atomically, gzip-compressed if its name ends in ``.gz``; create its folder."""
    _replace(path, dumps(trace, notes=notes))


def write_json(trace: Trace, path: Path) -> None:
    """Write a trace as one JSON document, for other tools. hashbench itself reads only the text form."""
    _replace(path, json.dumps(dataclasses.asdict(trace), indent=1))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, bytes_for(path, text))


def record_line(record: OpRecord, writers: Mapping[str, str]) -> str:
    """Format one record without notes. ``writers`` has the :func:`writer_text` of writers, by id."""
    outputs, line = record.outputs, f"op\t{_escape(record.id)}\t"
    if record.inputs:
        line += " ".join([_ref_text(ref, writers) for ref in record.inputs])
    line += f"\t{_escape(record.arguments, spaces=False)}\t->"
    if outputs:
        line += " " + (digest_text(outputs[0]) if len(outputs) == 1 else " ".join(map(digest_text, outputs)))
    more = record.scalar, record.rng, record.forward_op, record.source, record.opaque, record.inside, record.launch
    if any(more):
        for name, value in zip(_EXTRAS, more, strict=False):
            if value:
                line += f"\t{name}={_escape(value, spaces=False)}"
    return f"{line}\tcollective={_collective_text(record.collective)}" if record.collective else line


def writer_text(node: str, digits: str) -> str:
    """Format a record or leaf as lines of its readers show it: its id, and the first digits of its digest."""
    return f"{_escape(node)}:{digits}"


def _collective_text(collective: Collective) -> str:
    """Format as the kind and ``name=value`` of whatever is not the default, separated by spaces."""
    named = (
        ("group", ",".join(map(str, collective.process_group))),
        ("ordinal", collective.ordinal or ""),
        ("contributed", ",".join(collective.contributed)),
        ("root", collective.root),
        ("peer", collective.peer),
        ("tag", collective.tag or ""),
    )
    return " ".join([collective.kind, *(f"{name}={value}" for name, value in named if value not in (None, ""))])


def digest_text(digest: TensorDigest) -> str:
    """Format a digest as ``dtype[shape]{stride}:value``; the stride is omitted if contiguous."""
    value = "\\blank" if digest.value == _BLANK else _escape(digest.value) or _BLANK
    return _form_text(*digest[:3]) + value


@functools.lru_cache(maxsize=4096)
def _form_text(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Format ``dtype[shape]{stride}:``."""
    return f"{_escape(dtype)}{layout_text(shape, stride)}:"


def _head(trace: Trace) -> Iterator[str]:
    yield "hashed-inputs" if trace.hashed_inputs else "plain"
    yield f"tracer={_escape(trace.tracer)}"
    if trace.tracer_reason:
        yield f"tracer_reason={_escape(trace.tracer_reason, spaces=False)}"
    if trace.rank is not None:
        yield f"rank={trace.rank.rank}/{trace.rank.world_size}"


def _result_line(result: Result) -> str:
    fields = ["result", _escape(result.name), digest_text(result.digest), _escape(result.source) or "-"]
    fields += [f"placement={_escape(result.placement, spaces=False)}"] if result.placement else []
    fields += [f"replicas={','.join(map(str, result.replicas))}"] if result.replicas else []
    return "\t".join(fields)


def _by_position(values: Iterable[_Positioned]) -> Mapping[int, list[_Positioned]]:
    positions: dict[int, list[_Positioned]] = defaultdict(list)
    for value in values:
        positions[value.position].append(value)
    return positions


def _ref_text(ref: Ref, writers: Mapping[str, str]) -> str:
    argument, source, offset, written, digest, layout = ref
    text = f"{argument}={writers.get(source) or writer_text(source, '-')}"
    if offset or written or digest:
        text += f"{f'+{offset}' if offset else ''}{'!' if written else ''}{f'@{digest}{layout}' if digest else ''}"
    return text


def short_digest(outputs: Sequence[TensorDigest]) -> str:
    """Return the first digits of a record's digest, as shown by its readers' lines."""
    if len(outputs) == 1:
        return outputs[0].value[:8] or _BLANK
    return xxhash.xxh3_64_hexdigest("".join(digest.value for digest in outputs).encode())[:8]


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _escape(text: str, *, spaces: bool = True) -> str:
    if _SPECIAL.search(text) is None:
        return text
    for plain, escaped in _ESCAPES.items():
        if plain in text and (spaces or plain != " "):
            text = text.replace(plain, escaped)
    return text


# ------------------------------------------------------------------------------------------------------ reading


def read(path: Path, *, most: int = LARGEST_FILE, cut: bool = False, parsed: ParsedRecords | None = None) -> Trace:
    """Read a trace file, gzip-compressed or plain text, of at most ``most`` bytes of text.

    Args:
        path: of the file.
        most: maximum number of bytes of text.
        cut: read a file that is truncated, or damaged towards its end, up to the last whole step before: ``ended`` of
            its rank is then :data:`CUT`.
        parsed: records of files read before, with which those of this file are shared.

    Raises:
        HashbenchError: the file is missing, no trace, of another version, truncated or damaged; or, with ``cut``, has
            no whole step. A truncated trace is never read as a shorter one that is whole.
    """
    try:
        text = read_text(path, most=most, members=True, cut=cut)
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    return loads(text, name=str(path), cut=cut, parsed=parsed)


def text_size(path: Path) -> int:
    """Return the bytes of a trace file's text: for gzip the number that the file claims (modulo 2**32).

    Raises:
        OSError: the file cannot be read.
    """
    with os.fdopen(open_file(path), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if opened.read(len(GZIP)) != GZIP or size < _LEAST_GZIP:
            return size
        opened.seek(-4, os.SEEK_END)
        return max(size, int.from_bytes(opened.read(4), "little"))


def loads(text: str, *, name: str = "trace", cut: bool = False, parsed: ParsedRecords | None = None) -> Trace:
    """Parse the text of a trace; ``name`` names it in errors; the rest is as for :func:`read`."""
    try:
        lines, is_cut = _whole_lines(text, name), False
    except HashbenchError:
        if not cut:
            raise
        lines, is_cut = _lines_of_whole_steps(text, name), True
    try:
        with uncollected():
            return _parse(lines, parsed or ParsedRecords(), is_cut=is_cut)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(name, f"a line cannot be parsed ({error})") from error


def _refuse_other_head(text: str, name: str) -> None:
    head = text.split("\n", 1)[0].split("\t")
    if head[0] != _MAGIC:
        raise _unreadable(name, "it is not a hashbench trace (unknown first line)")
    if head[1:2] != [str(TRACE_SCHEMA)]:
        version = head[1] if len(head) > 1 else "none"
        raise _unreadable(name, f"it has schema version {version}, this hashbench reads {TRACE_SCHEMA}")


def _whole_lines(text: str, name: str) -> list[str]:
    _refuse_other_head(text, name)
    body, end, tail = text.rpartition("end\t")
    fields = tail.split("\t")
    lines = body.split("\n")[:-1]  # not splitlines, which also splits at form feeds
    if not end or not body.endswith("\n") or len(fields) != 2 or not tail.endswith("\n"):
        raise _unreadable(name, "it is truncated (no closing line)")
    if fields[0] != str(len(lines)) or fields[1] != f"{_checksum(body)}\n":
        raise _unreadable(name, "it is damaged (checksum mismatch)")
    return lines


def _lines_of_whole_steps(text: str, name: str) -> list[str]:
    """Return the lines up to the end of the last whole step."""
    _refuse_other_head(text, name)
    whole = start = count = 0
    checksum = xxhash.xxh3_64()
    for closing in _CLOSED_STEP.finditer(text):
        at = closing.start() + 1
        checksum.update(text[start:at].encode())
        count += text.count("\n", start, at)
        if (closing[1], closing[2]) != (str(count), checksum.hexdigest()):
            break
        start, whole = at, closing.end()
    if not whole:
        raise _unreadable(name, "it has no whole step")
    return text[:whole].split("\n")[:-1]


def _unreadable(name: object, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the trace {name}",
        consequence=f"{reason}, so nothing was compared",
        tip="Make it again with `hashbench sweep --keep-traces` or `HashDebugTrace.save`.",
    )


def _parse(lines: Sequence[str], parsed: ParsedRecords, *, is_cut: bool) -> Trace:
    records: list[OpRecord] = []
    places: dict[str, int] = {}
    leaves: list[Leaf] = []
    results: list[Result] = []
    marks: list[SettingsMark] = []
    early: list[EarlyRead] = []
    steps: list[TracedStep] = []
    settings: dict[str, str] = {}
    ended = ""
    for line in lines[1:]:
        if line.startswith("op\t"):
            records.append(parsed.of(line))
            if records[-1].collective is not None:
                places[records[-1].id] = len(records) - 1
            continue
        kind, *fields = line.split("\t")
        match kind:
            case "arrived":
                identity, digests = fields
                place = places[_unescape(identity)]
                records[place] = _arrived(records[place], tuple(map(parse_digest, digests.split(" "))))
            case "leaf":
                leaf_id, leaf_kind, digest, *rest = fields
                initial = rest[0].removeprefix("was=") if rest else ""
                leaves.append(Leaf(_unescape(leaf_id), leaf_kind, parse_digest(digest), len(records), initial))
            case "result":
                results.append(_parse_result(fields))
            case "step":
                steps.append(TracedStep(int(fields[0]), len(records), tuple(results)))
                results.clear()
            case "ended":
                ended = _unescape(fields[0])
            case "setting":
                position, label, changed = fields
                settings.update(json.loads(changed))
                settings = {name: value for name, value in settings.items() if value is not None}
                marks.append(SettingsMark(int(position), _unescape(label), tuple(sorted(settings.items()))))
            case "early":
                collective, by, reader, source = fields
                read = EarlyRead(_unescape(collective), _unescape(reader), _unescape(source), is_result=by == "result")
                early.append(read)
            case _:
                _fail(f"unknown kind {kind!r}")
    head = _parse_head(lines[0].split("\t")[2:], CUT if is_cut else ended)
    made = tuple(results) or (steps[-1].results if steps else ())
    trace = Trace(
        tuple(records), tuple(leaves), made, tuple(marks), early_reads=tuple(early), steps=tuple(steps), **head
    )
    _check_references(trace)
    return trace


def _arrived(record: OpRecord, outputs: tuple[TensorDigest, ...]) -> OpRecord:
    if [digest[:3] for digest in record.outputs] != [digest[:3] for digest in outputs]:
        _fail(f"other outputs of {record.id} arrived")
    return dataclasses.replace(record, outputs=outputs)


def _parse_result(fields: Sequence[str]) -> Result:
    name, digest, source, *rest = fields
    more = dict(field.split("=", 1) for field in rest)
    if unknown := more.keys() - {"placement", "replicas"}:
        _fail(f"unknown field {min(unknown)!r:.40}")
    writer = "" if source == "-" else _unescape(source)
    replicas = tuple(map(int, filter(None, more.get("replicas", "").split(","))))
    return Result(_unescape(name), parse_digest(digest), writer, _unescape(more.get("placement", "")), replicas)


def _parse_head(fields: Sequence[str], ended: str) -> dict[str, Any]:
    named = dict(field.split("=", 1) for field in fields[1:])
    tracer = named.get("tracer", "python")
    if tracer not in TRACERS[1:]:
        _fail(f"unknown tracer {tracer!r}")
    reason = _unescape(named.get("tracer_reason", ""))
    rank, _, size = named.get("rank", "").partition("/")
    return {
        "hashed_inputs": fields[:1] == ["hashed-inputs"],
        "tracer": tracer,
        "tracer_reason": reason,
        "rank": TracedRank(int(rank), int(size), ended) if rank else None,
    }


def _parse_collective(text: str) -> Collective:
    kind, *rest = text.split(" ")
    named = dict(field.split("=", 1) for field in rest)
    if unknown := named.keys() - {"group", "ordinal", "contributed", _CONTRIBUTED_BEFORE, "root", "peer", "tag"}:
        _fail(f"unknown field {min(unknown)!r:.40}")
    root, peer = (int(named[name]) if name in named else None for name in ("root", "peer"))
    return Collective(
        kind,
        tuple(map(int, filter(None, named.get("group", "").split(",")))),
        int(named.get("ordinal", 0)),
        tuple(filter(None, named.get("contributed", named.get(_CONTRIBUTED_BEFORE, "")).split(","))),
        root,
        peer,
        int(named.get("tag", 0)),
    )


class ParsedRecords:
    """What was parsed of the records of other files: a line that occurred before gives the same record, so that those
    of two runs can be compared by identity and take memory once. Words that recur are one object each."""

    def __init__(self) -> None:
        self._records: dict[str, OpRecord] = {}
        self._places: dict[str, tuple[str, int | None, str, str]] = {}
        self._layouts: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
        self._refs: dict[str, Ref] = {}
        self._texts: dict[str, str] = {}

    def of(self, line: str) -> OpRecord:
        """Return the record of a line; raise ``ValueError`` or the like if it is none."""
        record = self._records.get(line)
        if record is None:
            record = self._records[line] = self._parsed(line.split("\t"))
        return record

    def _parsed(self, fields: Sequence[str]) -> OpRecord:
        _, id_text, inputs, arguments, outputs, *rest = fields
        refs, texts = self._refs, self._texts  # a call each for 20,000 records would take a quarter of the time
        record_id = texts.get(id_text) or self._name(id_text)
        phase, iteration, module, op = self._place(record_id)
        written = tuple([self._digest(text) for text in outputs.split(" ")[1:]])
        read = tuple([refs.get(text) or self._ref(text) for text in inputs.split(" ")]) if inputs else ()
        blank = "" in [digest.value for digest in written]
        more = dict([self._extra(field) for field in rest if not field.startswith(_NOTE)]) if rest else {}
        words = texts.get(arguments) or self._name(arguments)
        return OpRecord(record_id, phase, iteration, module, op, read, words, written, blank=blank, **more)

    def _extra(self, field: str) -> tuple[str, Any]:
        """Return a field of a record and its value."""
        name, equals, text = field.partition("=")
        attribute = (equals and _EXTRAS.get(name)) or _fail(f"unknown field {name!r:.40}")
        if name == "collective":
            return attribute, _parse_collective(text)
        return attribute, self._texts.get(text) or self._name(text)

    def _place(self, record_id: str) -> tuple[str, int | None, str, str]:
        """Return phase, iteration, module and op of a record's id."""
        key, counted, count = record_id.rpartition("#")
        found = self._places.get(key)
        if found is None or "/" in count:
            where, _, rest = record_id.partition("/")
            module, _, op_count = rest.rpartition("/")
            phase, _, iteration = where.partition(".")
            found = phase, int(iteration) if iteration else None, module, op_count.rpartition("#")[0]
            if counted and "/" not in count:
                self._places[key] = found
        return found

    def _ref(self, text: str) -> Ref:
        part = _REF.fullmatch(text) or _fail(f"not a reference: {text!r}")
        argument, source, offset, written, digest, layout = part.groups()
        place = self._name(argument), self._name(source), int(offset or 0), bool(written)
        made = Ref(*place, digest or "", self._name(layout or ""))
        self._refs[text] = made
        return made

    def _digest(self, text: str) -> TensorDigest:
        head, _, value = text.partition(":")
        layout = self._layouts.get(head)
        if layout is None:
            digest = parse_digest(text)
            if _DIGEST.fullmatch(f"{head}:"):
                self._layouts[head] = digest[:3]
            return digest
        return TensorDigest(*layout, "" if value == _BLANK else _unescape(value) if "\\" in value else value)

    def _name(self, text: str) -> str:
        """Unescape; equal texts give one object."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = _unescape(text)
        return found


_EXTRAS: Mapping[str, str] = MappingProxyType(
    {"scalar": "scalar", "rng": "rng", "forward": "forward_op", "source": "source", "opaque": "opaque"}
    | {"inside": "inside", "launch": "launch", "collective": "collective"}
)
"""Field of an ``op`` line -> attribute of the record."""

_REF = re.compile(
    r"(?P<argument>[^=]+)=(?P<source>.+):(?:[0-9a-z-]+)(?:\+(?P<offset>\d+))?(?P<written>!?)"
    r"(?:@(?P<digest>[^\s\[]+)(?P<layout>\[[\d,]*\](?:\{[\d,-]*\})?)?)?"
)
_DIGEST = re.compile(r"(?P<dtype>[^\[]+)\[(?P<shape>[^\]]*)\](\{(?P<stride>[^}]*)\})?:(?P<value>.*)")


def parse_digest(text: str) -> TensorDigest:
    """Parse the output of :func:`digest_text`; raise ``ValueError`` for any other text."""
    part = _DIGEST.fullmatch(text) or _fail(f"not a digest: {text!r}")
    shape = _integers(part["shape"])
    stride = contiguous_stride(shape) if part["stride"] is None else _integers(part["stride"])
    value = "" if part["value"] == _BLANK else _unescape(part["value"])
    return TensorDigest(_unescape(part["dtype"]), shape, stride, value)


def _check_references(trace: Trace) -> None:
    known = {leaf.id for leaf in trace.leaves}
    names = {result.name for results in (trace.results, *(step.results for step in trace.steps)) for result in results}
    if len(known) != len(trace.leaves):
        _fail("two leaves have one name")
    for results in (trace.results, *(step.results for step in trace.steps)):
        if len({result.name for result in results}) != len(results):
            _fail("two results have one name")
    for record in trace.records:
        missing = next((ref.source for ref in record.inputs if ref.source not in known), None)
        if missing is not None or record.id in known:
            _fail(f"{record.id} reads {missing}" if missing else f"{record.id} appears twice")
        known.add(record.id)
    for read in trace.early_reads:
        readers = names if read.is_result else known
        if read.collective not in known or read.reader not in readers:
            _fail(f"{read.reader} reads {read.collective} early, and one of them is missing")


def _integers(text: str) -> tuple[int, ...]:
    values = text.split(",") if text else []
    if len(values) > _MOST_DIMENSIONS or any(len(value) > _MOST_DIGITS for value in values):
        _fail("a shape or stride is too large")  # strides are products of sizes, and would be unbounded too
    return tuple(map(int, values))


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _UNESCAPES.get(match[1], match[1]), text) if "\\" in text else text


def _fail(reason: str) -> NoReturn:
    raise ValueError(reason)


def refuse_different(first: str, second: str, *, names: tuple[str, str] = ("the first", "the second")) -> None:
    """Raise :class:`HashbenchError` if the tracers ``first`` and ``second`` differ; ``names`` name their traces."""
    if first != second:
        raise HashbenchError(
            f"the traces are of different tracers: {names[0]} is {first}, {names[1]} is {second}",
            consequence=f"{OTHER_OPS}, so nothing was compared",
            tip="Make both with one: `--tracer`, or the argument of that name.",
        )
