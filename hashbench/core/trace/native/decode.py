"""Decode the native recorder's structures, with the layouts of ``native/tables.h``."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hashbench.core.native.library import LANES, LEAVES, METAS, OTHERS, READS, RECORDS, WRITES, Library
from hashbench.core.records import TensorDigest, contiguous_stride
from hashbench.core.trace import arguments
from hashbench.core.trace.build import RawLeaf, RawRecord
from hashbench.core.trace.digest import RawDigest, dtype_name
from hashbench.core.trace.lanes import LaneStart
from hashbench.core.trace.module_paths import Contexts
from hashbench.core.trace.native.ops import Op
from hashbench.core.trace.reads import PLAIN_TYPES
from hashbench.core.trace.registered import Registered

_RECORD = struct.Struct("=qQiIIIIIiIII")
_READ = struct.Struct("=iiq")
_WRITE = struct.Struct("=QII")
_LEAF = struct.Struct("=QQqIIiI")
_LANE = struct.Struct("=iiiI")
_SEQUENCE, _OP, _CONTEXT, _FIRST_READ, _FIRST_WRITE, _CALLER, _READS, _WRITES, _LANE_OF = 0, 2, 4, 5, 6, 8, 9, 10, 11
_RECORD_FIELDS = np.dtype([("sequence", "i8"), ("rng", "u8"), ("op", "i4"), ("rest", "V36")])
_CALLER_FIELD = np.dtype({"names": ["caller"], "formats": ["i4"], "offsets": [40], "itemsize": _RECORD.size})
_LEAF_FIELDS = np.dtype([("storage", "u8"), ("rest", "V24"), ("name", "i4"), ("unused", "i4")])
_BACKWARD, _STRIDED = 1 << 31, 1 << 8
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def leaf_storages(library: Library, recorder: int) -> list[int]:
    """Return the addresses of the storages of all leaves so far."""
    return [storage for storage, *_ in _LEAF.iter_unpack(library.bytes_of(recorder, LEAVES, _LEAF.size))]


def recorded_ops(library: Library, recorder: int) -> list[int]:
    """Return the numbers of the ops of all records so far, each once; below 0 where Python makes the record."""
    records = np.frombuffer(library.bytes_of(recorder, RECORDS, _RECORD.size), _RECORD_FIELDS)
    return sorted(set(records["op"].tolist()))  # np.unique imports a module, for which no descriptor may be left


def content_of(
    library: Library, recorder: int, *, first_sequence: int
) -> tuple[list[bytes], list[tuple[int, int]]] | None:
    """Return the recorder's content without addresses and without the sequence numbers of older autograd nodes (before
    ``first_sequence``), and each leaf's storage address and name number. ``None`` if a record that Python was to make
    is missing."""

    def fields(what: int, form: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return np.frombuffer(bytearray(library.bytes_of(recorder, what, form.itemsize)), form)

    records, leaves = fields(RECORDS, _RECORD_FIELDS), fields(LEAVES, _LEAF_FIELDS)
    if (records["op"] < 0).any():
        return None
    sequence = records["sequence"]
    records["sequence"] = np.where(sequence >= first_sequence, sequence - first_sequence, -1)
    named = list(zip(leaves["storage"].tolist(), leaves["name"].tolist(), strict=True))
    leaves["storage"] = leaves["unused"] = 0
    parts = [library.bytes_of(recorder, what, form.size) for what, form in ((READS, _READ), (WRITES, _WRITE))]
    texts = [library.texts(recorder, what) for what in (OTHERS, METAS)]
    return [records.tobytes(), leaves.tobytes(), *parts, repr(texts).encode()], named


class DecodedTrace:
    """Content of the recorder for one trace, as Python records and leaves: all so far, or what :meth:`load` found since
    :meth:`release`.

    Args:
        library: of the recorder.
        recorder: address of the recorder.
        callbacks: lanes of callbacks. They run inside another thread's backward pass or not, as time will have it: none
            of their records is part of one.
    """

    def __init__(self, library: Library, recorder: int, callbacks: Container[int]) -> None:
        self._library, self._recorder, self._callbacks = library, recorder, callbacks
        self._texts: dict[tuple[int, int], str] = {}
        self._tables: dict[int, list[bytes]] = {OTHERS: [], METAS: []}
        self._shapes = _Cached(self._shape)
        self._first = 0
        self._waiting: dict[int, tuple[Any, ...]] = {}  # calls without a record so far, by number
        self._ended: dict[int, int] = {}  # callers, which ended since, of earlier calls
        self.load()

    def load(self) -> None:
        """Read the calls since the last :meth:`release`."""
        content = self._library.bytes_of(self._recorder, RECORDS, _RECORD.size)
        self._calls = list(_RECORD.iter_unpack(memoryview(content)[self._first * _RECORD.size :]))
        callers = np.frombuffer(content, _CALLER_FIELD, count=self._first)["caller"]
        self._ended = {int(number): int(callers[number]) for number in np.flatnonzero(callers >= self._first)}

    def release(self, made: Iterable[int]) -> None:
        """Drop the calls, except those whose record Python has not made; ``made`` are the numbers that it has."""
        numbered = enumerate(self._calls, self._first)
        self._waiting |= {number: call for number, call in numbered if call[_OP] < 0}
        for number in made:
            self._waiting.pop(number, None)
        self._first += len(self._calls)
        self._calls = []

    def _call(self, number: int) -> tuple[Any, ...]:
        return self._waiting[number] if number < self._first else self._calls[number - self._first]

    def _unpacked(self, what: int, form: struct.Struct, *, first: int = 0) -> list[tuple[Any, ...]]:
        return list(form.iter_unpack(self._library.bytes_of(self._recorder, what, form.size, first=first)))

    # ------------------------------------------------------------------------- of all records, also those of Python's

    def lanes(self) -> list[LaneStart]:
        """Return the lanes by number; the first is the main thread."""
        return list(map(LaneStart._make, self._unpacked(LANES, _LANE)))

    def lane_of(self, number: int) -> int:
        """Return the number of a record's lane."""
        lane: int = self._call(number)[_LANE_OF]
        return lane

    def callers(self) -> dict[int, int]:
        """Return the number of the enclosing record, by record number."""
        numbered = [*self._waiting.items(), *enumerate(self._calls, self._first)]
        return self._ended | {number: call[_CALLER] for number, call in numbered if call[_CALLER] >= 0}

    def placed(self, made: RawRecord, contexts: Contexts) -> RawRecord:
        """Complete a record made by Python with the context of its thread."""
        kept = self._call(made.number)
        sequence = made.sequence | kept[_SEQUENCE]
        if not kept[_LANE_OF]:
            return made._replace(sequence=sequence) if kept[_SEQUENCE] else made
        module, iteration, optimizing = contexts[kept[_CONTEXT]]
        alone = kept[_LANE_OF] in self._callbacks
        backward = made.phase == "backward" and not alone
        phase = "backward" if backward else "optimizer" if optimizing else "forward"
        sequence = -1 if alone else sequence
        return made._replace(phase=phase, iteration=iteration, module=module, sequence=sequence)

    # ------------------------------------------------------------------------------------------- of the recorder's own

    def records(
        self,
        ops: Mapping[int, Op],
        contexts: Contexts,
        in_python: Mapping[int, RawRecord],
        odd: Sequence[RawDigest],
    ) -> Iterator[RawRecord]:
        """Yield the records in order.

        Args:
            ops: ops by number.
            contexts: contexts by number.
            in_python: records made by Python, by number.
            odd: digests that Python made for the recorder.
        """
        made: Any = tuple.__new__  # half the time of a named tuple's constructor
        shapes, texts, callbacks = self._shapes, self._texts, self._callbacks
        places = _Cached(contexts.__getitem__)
        first_read = min((call[_FIRST_READ] for call in self._calls if call[_READS]), default=0)
        first_write = min((call[_FIRST_WRITE] for call in self._calls if call[_WRITES]), default=0)
        all_reads = self._unpacked(READS, _READ, first=first_read)
        all_writes = self._unpacked(WRITES, _WRITE, first=first_write)
        yield from (in_python[number] for number in self._waiting if number in in_python)
        for number, (
            sequence,
            state_digest,
            at,
            others,
            context,
            first,
            write,
            returned,
            _,
            reads,
            writes,
            lane,
        ) in enumerate(self._calls, self._first):
            if at < 0:
                if number in in_python:  # else its digest failed, and Python dropped it
                    yield in_python[number]
                continue
            op = ops[at]
            module, iteration, optimizing = places[context & ~_BACKWARD]
            module = op.plan.module or module
            phase = "backward" if context & _BACKWARD else "optimizer" if optimizing else "forward"
            if lane in callbacks:
                phase, sequence = "optimizer" if optimizing else "forward", -1
            parts: list[Any] = []
            if reads:
                arguments_of = op.places
                first -= first_read
                for node, argument, offset in all_reads[first : first + reads]:
                    parts += (arguments_of[argument], node, offset)
            written: list[RawDigest | TensorDigest] = []
            if writes:
                write -= first_write
                for value, meta, state in all_writes[write : write + writes]:
                    content = "" if state else f"{value:016x}"
                    written.append(odd[meta] if state == 2 else made(TensorDigest, (*shapes[meta], content)))
            text = texts.get((at, others))
            if text is None:
                text = self._other_arguments(op, at, others)
            scalar = self._scalar(returned) if returned else None
            rng = state_digest if op.plan.seeded else None
            reads_of, digests = tuple(parts), tuple(written)
            yield made(
                RawRecord,
                (op.plan, phase, iteration, module, sequence, reads_of, text, digests, scalar, rng, number),
            )

    def leaves(
        self,
        contexts: Contexts,
        state: Callable[[int], tuple[str, str, str]],
        registered: Registered,
        in_python: Mapping[int, RawLeaf],
        *,
        first: int = 0,
    ) -> Iterator[RawLeaf]:
        """Yield the leaves in order from the ``first`` on; ``in_python`` are those made by Python, by number."""
        kept = self._unpacked(LEAVES, _LEAF)
        registrations = registered.along(storage for storage, *_ in kept)
        for place, ((_, value, position, meta, context, name, _), registration) in itertools.islice(
            enumerate(zip(kept, registrations, strict=True)), first, None
        ):
            if name == -3:
                yield in_python[-1 - place]
                continue
            kind, label = "parameter" if name == -2 else "other", contexts[context][0]
            if name >= 0:
                kind, path, attribute = state(name)
                label = f"{path}.{attribute}"
            digest = (*self._meta(meta), value)
            kind, label, initial = registration or (kind, label, None)
            yield kind, label, digest, position, None if initial is None else (initial, digest)

    def _text(self, what: int, number: int) -> bytes:
        """Return an interned byte string."""
        table = self._tables[what]
        if number >= len(table):
            table += self._library.texts(self._recorder, what, first=len(table))
        return table[number]

    def _meta(self, number: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]:
        return _meta(self._text(METAS, number), self._library.dtypes)

    def _shape(self, number: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        dtype, shape, stride = self._meta(number)
        return dtype_name(dtype), shape, stride or contiguous_stride(shape)

    @functools.cached_property
    def _enumerated(self) -> dict[str, Mapping[int, Any]]:
        """Python values of C++ enumerations, by argument type."""
        return {
            "ScalarType": self._library.dtypes,
            "Layout": {number: getattr(torch, name) for number, name in enumerate(_LAYOUTS)},
            "MemoryFormat": {number: getattr(torch, name) for number, name in enumerate(_FORMATS)},
        }

    def _other_arguments(self, op: Op, at: int, number: int) -> str:
        """Return the text of a call's non-tensor arguments."""
        if (at, number) not in self._texts:
            reader = _Values(self._text(OTHERS, number), self._enumerated)
            found = []
            while reader.more:
                position = reader.byte()
                name, value = op.names[position], reader.value(op.kinds[position])
                found.append((name, value) if isinstance(name, str) else value)
            self._texts[at, number] = arguments.argument_text(found)
        return self._texts[at, number]

    def _scalar(self, number: int) -> Any:
        value = _Values(self._text(OTHERS, number - 1), {}).value("") if number else None
        return value if type(value) in PLAIN_TYPES else None


class _Cached(dict[int, Any]):
    """Cache of a function of a number."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, number: int) -> Any:
        self[number] = made = self._function(number)
        return made


def _meta(
    text: bytes, dtypes: Mapping[int, torch.dtype]
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]:
    """Unpack dtype, shape and stride as packed by ``meta_of`` of ``digest.h``; stride ``None`` means contiguous."""
    head, *sizes = struct.unpack(f"={len(text) // 8}q", text)
    if not head & _STRIDED:
        return dtypes[head], tuple(sizes), None
    half = len(sizes) // 2
    return dtypes[head & ~_STRIDED], tuple(sizes[:half]), tuple(sizes[half:])


class _Unknown:
    """Placeholder for an argument of which only the type's name was recorded."""


class _Values:
    """Reader for values written by ``put_value`` of ``arguments.h``."""

    def __init__(self, text: bytes, enumerated: Mapping[str, Mapping[int, Any]]) -> None:
        self._text, self._at, self._enumerated = text, 0, enumerated

    @property
    def more(self) -> bool:
        return self._at < len(self._text)

    def byte(self) -> int:
        self._at += 1
        return self._text[self._at - 1]

    def value(self, kind: str) -> Any:
        """Read the next value, of an argument of this type."""
        tag = chr(self.byte())
        if tag in "ntf":
            return {"n": None, "t": True, "f": False}[tag]
        if tag == "i":
            (number,) = self._take("=q")
            return self._enumerated.get(kind, {}).get(number, number)
        if tag == "d":
            return self._take("=d")[0]
        if tag == "c":
            return complex(*self._take("=dd"))
        (count,) = self._take("=q")
        if tag in "ID":
            return list(self._take(f"={count}{'q' if tag == 'I' else 'd'}"))
        if tag == "L":
            return [self.value(kind) for _ in range(count)]
        text = self._text[self._at : self._at + count].decode()
        self._at += count
        if tag == "s":
            return text
        return torch.device(text) if tag == "v" else type(text, (_Unknown,), {})()

    def _take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self._at += size
        return struct.unpack_from(form, self._text, self._at - size)
