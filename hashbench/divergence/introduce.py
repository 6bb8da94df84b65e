"""Two traces to a verdict: where did the difference enter that reached the results?

Pure: imports no torch, reads no files. The rules are those of the table in ``docs/design.md``, "The verdict on a pair":

1. align the two runs (``alignment``);
2. for every pair of records, decide whether what it *wrote* differs, and if so whether it *introduced* the difference
   (and how: its origin) or only passed on what it read;
3. from the results that differ, walk back through whatever differs (the causal slice); the first introduction in it is
   the divergence. Records that differ outside the slice are benign.

Nodes are ids of records and leaves of the first run; what only the second run has is a node too, with ``2:`` before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hashbench.divergence.align import align
from hashbench.divergence.unwritten import Coverage
from hashbench.errors import HashbenchError
from hashbench.records import Divergence, Leaf, OpRecord, Ref, Result, Steering, Trace, Verdict

_SECOND = "2:"


def find(first: Trace, second: Trace, *, differing: Sequence[str] | None = None) -> Verdict:
    """The verdict on a pair of runs.

    Args:
        first, second: the traces of two runs that should be identical.
        differing: names of the results that differ, where the caller compared them itself. Default: those whose
            digests differ. Traces without results (of a plain ``HashDebugTrace``) are judged by every record.

    Raises:
        HashbenchError: a trace is empty, so that nothing would be compared.
    """
    for name, trace in (("first", first), ("second", second)):
        if not trace.records and not trace.results:
            raise HashbenchError(
                f"the {name} trace is empty",
                consequence="nothing was compared, which is not the same as equal",
                tip="Check that the code under the trace ran any torch op in this thread.",
            )
    return _Judgement(first, second).verdict(differing)


@dataclass(frozen=True, slots=True)
class _Source:
    """A difference that entered at a node: the origin, what to call it, and where in the first run it is. A setting is
    no node; ``felt_at`` is the first record whose output it changed."""

    origin: str
    node: str
    position: int
    detail: str
    first: str
    second: str
    opaque_producer: bool = False
    felt_at: str = ""


_RANK = {"input": 0, "state": 1}
"""Origins that lie before the first op, wherever the tensor is first read."""

_ALIASES = frozenset({"alias", "detach", "lift_fresh"})
"""Views that show exactly what they view: one more or less of them changes nothing."""

_COPIES = frozenset({"_to_copy", "cat", "clone", "copy", "copy_", "lift_fresh_copy", "stack"})
"""Ops that only move elements, so that no kernel of theirs can be what differs."""

_OVERWRITING = frozenset(
    {"_index_put_impl_", "copy_", "fill_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_", "zero_"}
)
"""In-place ops whose result is not computed from what was there before."""


class _Judgement:
    """The two traces side by side, and what is known of every node so far."""

    def __init__(self, first: Trace, second: Trace) -> None:
        self.first, self.second = first, second
        self.pairs = align(first.records, second.records)
        self.hashed = first.hashed_inputs and second.hashed_inputs
        self.leaves_a = {leaf.id: leaf for leaf in first.leaves}
        self.leaves_b = {leaf.id: leaf for leaf in second.leaves}
        self.records: dict[str, tuple[OpRecord | None, OpRecord | None]] = {}
        self.position: dict[str, int] = {}
        self.node_of_b: dict[str, str] = {}
        self.differs: set[str] = set()
        self.tainted: set[str] = set()
        self.hidden_edges: dict[str, list[str]] = {}
        self.sources: dict[str, _Source] = {}
        self.odd_views: dict[str, str] = {}
        self.scalars: list[str] = []
        self.lone_scalars: list[str] = []
        self.lone_draws: dict[tuple[bool, str], str] = {}
        self.shifted_by = ""
        self._map_nodes()
        self._judge_leaves()
        for node in self.records:
            self._judge_record(node)

    @cached_property
    def coverage_a(self) -> Coverage:
        """Needed only where something differs."""
        return Coverage(self.first)

    @cached_property
    def coverage_b(self) -> Coverage:
        """The same of the second run; needed only where ops differ too."""
        return Coverage(self.second)

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of every node, leaves before records."""
        return {node: place for place, node in enumerate([*self.leaves_a, *self.records])}

    # ----------------------------------------------------------------------------------------------- nodes

    def _map_nodes(self) -> None:
        self.node_of_b = {name: name if name in self.leaves_a else _SECOND + name for name in self.leaves_b}
        position = 0
        for place_a, place_b in self.pairs:
            a = None if place_a is None else self.first.records[place_a]
            b = None if place_b is None else self.second.records[place_b]
            position = position if place_a is None else place_a
            node = a.id if a is not None else _SECOND + b.id if b is not None else ""
            if b is not None:
                self.node_of_b[b.id] = node
            self.records[node] = (a, b)
            self.position[node] = position

    def _judge_leaves(self) -> None:
        for name, a in self.leaves_a.items():
            self.position[name] = a.position
            b = self.leaves_b.get(name)
            if b is None or (a.digest == b.digest and a.initial == b.initial):
                continue
            self.differs.add(name)
            if a.digest != b.digest:
                self.tainted.add(name)
                self.sources[name] = _leaf_source(a, b)
        for name, b in self.leaves_b.items():
            if name not in self.leaves_a:
                self.position[_SECOND + name] = b.position

    # --------------------------------------------------------------------------------------------- records

    def _judge_record(self, node: str) -> None:
        a, b = self.records[node]
        if a is None or b is None:
            self._judge_unmatched(node, a, b)
            return
        wrote_differently = a.outputs != b.outputs or a.scalar != b.scalar
        source = self._introduced(node, a, b, wrote_differently)
        is_view = not a.outputs and not b.outputs and not a.scalar and not b.scalar
        if is_view:
            if source is not None or a.arguments != b.arguments:
                self._remember_view(node, a, b)
                self.sources.update({node: source} if source is not None else {})
            return
        if a.scalar != b.scalar:
            self.scalars.append(node)
        if wrote_differently:
            self.differs.add(node)
            self.tainted.add(node)
            if source is not None:
                self.sources[node] = source
        elif any(r.written and r.source in self.tainted and self._writes_only_part(a, r) for r in a.inputs):
            self.tainted.add(node)

    def _writes_only_part(self, a: OpRecord, ref: Ref) -> bool:
        """Whether a difference stays in memory that ``a`` writes to, beside what it writes."""
        return self.coverage_a.writes_only_part(a, ref.source)

    def _judge_unmatched(self, node: str, a: OpRecord | None, b: OpRecord | None) -> None:
        record = a or b
        if record is None:
            return
        self.differs.add(node)
        self.tainted.add(node)
        has, lacks = ("first", "second") if a is not None else ("second", "first")
        self.sources[node] = _Source(
            "sequence",
            node,
            self.position[node],
            f"only the {has} run has this op; the {lacks} run goes on with another",
            _seen(a),
            _seen(b),
        )
        if record.rng:
            self.lone_draws.setdefault((a is not None, record.rng), node)
        if record.scalar:
            self.lone_scalars.append(node)
        elif not record.outputs and _name(record) not in _ALIASES:
            self._remember_view(node, a, b)

    def _remember_view(self, node: str, a: OpRecord | None, b: OpRecord | None) -> None:
        """A view taken differently, or in one run only: what reads that memory may be reading other elements."""
        self.differs.add(node)
        for source in self._read_by(a, b):
            self.odd_views[source] = node

    def _read_by(self, a: OpRecord | None, b: OpRecord | None) -> Iterator[str]:
        if a is not None:
            yield from (ref.source for ref in a.inputs)
        if b is not None:
            yield from (self.node_of_b[ref.source] for ref in b.inputs)

    def _introduced(self, node: str, a: OpRecord, b: OpRecord, wrote_differently: bool) -> _Source | None:
        """How this pair of records introduced a difference; ``None`` where it only passed one on, or has none."""
        at = self.position[node]
        if a.rng != b.rng and not self._explained_by_draw(node, a, b):
            detail = "the random generator was in another state before this op"
            return _Source("rng", node, at, detail, f"generator state {a.rng}", f"generator state {b.rng}")
        explained = a.rng != b.rng
        if a.arguments != b.arguments:
            if not self._explained_by_scalar(node, a, b):
                detail = "an argument that is not a tensor has another value"
                return _Source("outside", node, at, detail, f"({a.arguments})", f"({b.arguments})")
            explained = True
        behind = self._written_behind(node, a, b) if wrote_differently else None
        if behind is not None:
            return behind
        if self._wired_differently(a, b):
            if self._explained_by_view(node, a, b):
                return None
            detail = "it reads another tensor than in the first run"
            return _Source("sequence", node, at, detail, _wiring(a), _wiring(b))
        if not wrote_differently or explained or self._read_a_difference(a, b) or self._explained_by_view(node, a, b):
            return None
        return self._blame_memory(a) or self._blame_hidden_write(node, a, b) or _kernel_source(node, at, a, b)

    def _explained_by_scalar(self, node: str, a: OpRecord, b: OpRecord) -> bool:
        """Whether the arguments differ by a scalar that an earlier record returned: then it flowed from there."""
        words_a, words_b = _words(a.arguments), _words(b.arguments)
        for name in reversed(self.scalars):
            old, new = self.records[name]
            if old is not None and new is not None and old.scalar in words_a and new.scalar in words_b:
                self.hidden_edges.setdefault(node, []).append(name)
                return True
        return False

    def _explained_by_draw(self, node: str, a: OpRecord, b: OpRecord) -> bool:
        """Whether the generator is ahead in one run because only that run drew from it before: then that draw is the
        cause, also of every later state that differs."""
        extra = self.lone_draws.get((False, a.rng)) or self.lone_draws.get((True, b.rng))
        self.shifted_by = self.shifted_by or extra or ""
        if self.shifted_by:
            self.hidden_edges.setdefault(node, []).append(self.shifted_by)
        return bool(self.shifted_by)

    def _explained_by_view(self, node: str, a: OpRecord, b: OpRecord) -> bool:
        """Whether an input was viewed differently (another slice, another order): then the view is to blame. Where what
        was read is known to be equal, it is not."""
        if self.hashed and _read_the_same(a, b):
            return False
        view = next((self.odd_views[name] for name in self._read_by(a, b) if name in self.odd_views), None)
        if view is None or view == node:
            return False
        self.hidden_edges.setdefault(node, []).append(view)
        return True

    def _wired_differently(self, a: OpRecord, b: OpRecord) -> bool:
        if len(a.inputs) != len(b.inputs):
            return True
        for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
            if ref_a.argument != ref_b.argument:
                return True
            if self._same_place(ref_a, ref_b) or (ref_a.digest and ref_a.digest == ref_b.digest):
                continue  # equal content in another place: what a kernel makes of that is its own doing
            if ref_a.offset != ref_b.offset or not self._same_content(ref_a, ref_b):
                return True
        return False

    def _same_place(self, ref_a: Ref, ref_b: Ref) -> bool:
        return ref_a.source == self.node_of_b[ref_b.source] and ref_a.offset == ref_b.offset

    def _same_content(self, ref_a: Ref, ref_b: Ref) -> bool:
        """Whether two reads of different nodes saw the same, as a reader of an extra copy does."""
        if ref_a.digest and ref_b.digest:
            return ref_a.digest == ref_b.digest
        content = self.coverage_a.content(ref_a.source)
        return content is not None and content == self.coverage_b.content(ref_b.source)

    def _carries(self, ref_a: Ref, ref_b: Ref) -> bool:
        """Whether a difference may come in here. Memory that is also written keeps what lies beside the write."""
        if ref_a.source == self.node_of_b[ref_b.source]:
            return ref_a.written or not self.hashed or ref_a.digest != ref_b.digest
        return ref_a.offset != ref_b.offset or not self._same_content(ref_a, ref_b)

    def _read_a_difference(self, a: OpRecord, b: OpRecord) -> bool:
        """Whether any input differed, by its content where that was hashed and else by its last writer."""
        if self.hashed:
            return any(x.digest != y.digest for x, y in zip(a.inputs, b.inputs, strict=True) if not self._is_target(x))
        return any(x.source in self.tainted for x, y in zip(a.inputs, b.inputs, strict=True) if self._carries(x, y))

    def _is_target(self, ref: Ref) -> bool:
        """Whether ``ref`` is fresh memory that the op fills: its old content is blank and says nothing."""
        return ref.written and bool(self.coverage_a.allocation_behind(ref.source))

    def _written_behind(self, node: str, a: OpRecord, b: OpRecord) -> _Source | None:
        """An input whose content differs although whatever wrote it last, as torch knows it, agreed in both runs."""
        if not self.hashed or len(a.inputs) != len(b.inputs):
            return None
        for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
            changed = ref_a.digest != ref_b.digest and ref_a.source == self.node_of_b[ref_b.source]
            if not changed or ref_a.offset != ref_b.offset or ref_a.source in self.tainted or self._is_target(ref_a):
                continue
            if ref_a.source in self.odd_views:
                continue
            memory = self._unwritten_memory(ref_a.source)
            if memory is not None:
                return memory
            detail = f"argument {ref_a.argument} was written behind torch's back after {_short(ref_a.source)}"
            at = self.position[node]
            return _Source("outside", node, at, detail, ref_a.digest, ref_b.digest, opaque_producer=True)
        return None

    def _blame_memory(self, a: OpRecord) -> _Source | None:
        """An op whose inputs are equal but for memory that nobody wrote: the allocation is to blame."""
        if a.blank:
            return None
        reads_its_target = a.op.startswith("aten.") and _name(a).endswith("_") and _name(a) not in _OVERWRITING
        for ref in a.inputs:
            is_read = reads_its_target if ref.written else not self.hashed
            memory = self._unwritten_memory(ref.source) if is_read else None
            if memory is not None:
                return memory
        return None

    def _unwritten_memory(self, name: str) -> _Source | None:
        """The allocation behind a tensor, if the recorded writes since then did not cover all of it."""
        allocation = self.coverage_a.allocation_behind(name)
        if not allocation:
            return None
        detail = "memory that this op allocated was read before it was written"
        return _Source("kernel", allocation, self.position[allocation], detail, "uninitialised", "uninitialised")

    def _blame_hidden_write(self, node: str, a: OpRecord, b: OpRecord) -> _Source | None:
        """A copy cannot change what it copies: one that differs read memory that was written behind torch's back."""
        written = {ref.source for ref in a.inputs if ref.written}
        races = any(ref.source in written for ref in a.inputs if not ref.written)
        if self.hashed or races or _name(a) not in _COPIES or not a.inputs:
            return None
        detail = "a copy of equal memory differs, so that memory was written behind torch's back"
        return _Source("outside", node, self.position[node], detail, _left(a), _left(b), opaque_producer=True)

    # --------------------------------------------------------------------------------------------- verdict

    def verdict(self, differing: Sequence[str] | None) -> Verdict:
        results_a = {result.name: result for result in self.first.results}
        results_b = {result.name: result for result in self.second.results}
        if differing is None:
            names = [*results_a, *(name for name in results_b if name not in results_a)]
            differing = [name for name in names if _content(results_a.get(name)) != _content(results_b.get(name))]
        reached = self._slice(list(self._roots(differing, results_a, results_b)))
        judged_by_records = not results_a and not results_b
        if judged_by_records:
            reached = self._slice(sorted(self.differs))
        chosen = self._choose(reached) if differing or judged_by_records else None
        if chosen is None and differing:
            chosen = self._after_the_last_write(differing, results_a, results_b)
        if chosen is not None and chosen.origin in ("sequence", "outside"):
            # A scalar reaches the results also by choosing what is run, if it was known before the runs parted.
            last = chosen.position if chosen.origin == "outside" else len(self.first.records)
            reached |= self._slice(
                [name for name in (*self.scalars, *self.lone_scalars) if self.position[name] <= last]
            )
        idle = self.differs - reached
        benign = tuple(node for node in self.records if node in idle and self._wrote(node))
        return Verdict(tuple(differing), None if chosen is None else self._divergence(chosen), benign)

    def _wrote(self, node: str) -> bool:
        """Whether the record left anything; a view that was taken differently left nothing of its own."""
        return any(record is not None and (record.outputs or record.scalar) for record in self.records[node])

    def _roots(
        self, differing: Sequence[str], results_a: dict[str, Result], results_b: dict[str, Result]
    ) -> Iterator[str]:
        for name in differing:
            a, b = results_a.get(name), results_b.get(name)
            if a is not None and a.source:
                yield a.source
            if b is not None and b.source:
                yield self.node_of_b[b.source]
            for value in (x for x in (a, b) if x is not None and not x.source):
                yield from (s for s in self.scalars if _returned(self.records[s], value.digest.value))

    def _slice(self, roots: Sequence[str]) -> set[str]:
        """Everything that differs, or passes a difference on, from which the roots can be reached."""
        reached: set[str] = set()
        waiting = [root for root in roots if root in self.tainted or root in self.differs]
        while waiting:
            node = waiting.pop()
            if node in reached:
                continue
            reached.add(node)
            source = self.sources.get(node)
            if source is not None and source.node != node:
                waiting.append(source.node)
            waiting.extend(name for name in self._edges(node) if name in self.tainted or name in self.differs)
        return reached

    def _edges(self, node: str) -> Iterator[str]:
        """The nodes from which a difference may have come into this one."""
        yield from self.hidden_edges.get(node, ())
        a, b = self.records.get(node, (None, None))
        if a is None or b is None or len(a.inputs) != len(b.inputs):
            yield from self._read_by(a, b)
            return
        for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
            if self._carries(ref_a, ref_b):
                yield from (ref_a.source, self.node_of_b[ref_b.source])

    def _choose(self, reached: set[str]) -> _Source | None:
        candidates = [self.sources[node] for node in reached if node in self.sources]
        settings = self._settings_source()
        if settings is not None and all(settings.position <= source.position for source in candidates):
            early = [source for source in candidates if source.origin in _RANK]
            felt = min(candidates, key=lambda source: source.position, default=settings)
            candidates = early or [replace(settings, felt_at=felt.node)]
        return self._earliest(candidates)

    def _earliest(self, candidates: Sequence[_Source]) -> _Source | None:
        """What lies before the first op first, then by position; the order of the nodes breaks ties."""
        return min(
            candidates,
            key=lambda found: (_RANK.get(found.origin, 2), found.position, self.order.get(found.node, 0)),
            default=None,
        )

    def _settings_source(self) -> _Source | None:
        """A global setting of torch in which the two runs differ; its position is where it was last known equal."""
        position = 0
        for a, b in zip(self.first.marks, self.second.marks, strict=False):
            old, new = dict(a.settings), dict(b.settings)
            changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
            if changed:
                name = changed[0]
                detail = f"the runs differ in torch's global settings at {a.label}: {', '.join(changed)}"
                shown = (f"{name}={old.get(name, 'absent')}", f"{name}={new.get(name, 'absent')}")
                return _Source("settings", f"setting:{name}", position, detail, *shown)
            position = a.position
        return None

    def _after_the_last_write(
        self, differing: Sequence[str], results_a: dict[str, Result], results_b: dict[str, Result]
    ) -> _Source:
        """Results that differ although all that torch recorded agrees: something wrote them behind its back."""
        name = differing[0]
        a, b = results_a.get(name), results_b.get(name)
        writer = a.source if a is not None else ""
        memory = self._unwritten_memory(writer)
        if memory is not None:
            return memory
        if a is None or b is None:
            detail = f"the result {name} exists in one run only"
        elif writer:
            detail = f"the result {name} was written behind torch's back after its last recorded write"
        else:
            detail = f"the result {name} was not computed by any recorded op"
        at = self.position.get(writer, max(0, len(self.first.records) - 1))
        old, new = ("absent" if x is None else x.digest.value for x in (a, b))
        hidden = bool(writer) and a is not None and b is not None
        return _Source("outside", writer, at, detail, old, new, opaque_producer=hidden)

    def _divergence(self, source: _Source) -> Divergence:
        a, b = self.records.get(source.felt_at or source.node, (None, None))
        record = a or b
        if record is None and self.first.records:
            record = self.first.records[min(source.position, len(self.first.records) - 1)]
        steering = self._steering(source) if source.origin in ("sequence", "outside") else None
        found = Divergence(
            origin=source.origin,
            node=source.node.removeprefix(_SECOND),
            kernel=record.op if record is not None else "",
            op_index=self.position.get(source.felt_at, source.position) if record is not None else None,
            phase=record.phase if record is not None else "",
            iteration=record.iteration if record is not None else 0,
            module=record.module if record is not None else "",
            forward_op=record.forward_op if record is not None else "",
            detail=source.detail,
            first=source.first,
            second=source.second,
            source=record.source if record is not None else "",
            opaque_producer=source.opaque_producer,
        )
        return replace(found, steered_by=steering)

    def _steering(self, source: _Source) -> Steering | None:
        """The last scalar before ``source`` that differed between the runs, and where its difference entered."""
        earlier = [name for name in self.scalars if self.position[name] <= source.position]
        if not earlier:
            return None
        name = earlier[-1]
        old, new = self.records[name]
        chosen = self._earliest([self.sources[node] for node in self._slice([name]) if node in self.sources])
        kernel = ""
        if chosen is not None:
            record = next((r for r in self.records.get(chosen.node, ()) if r is not None), None)
            kernel = record.op if record is not None else chosen.node
        return Steering(name, old.scalar if old else "", new.scalar if new else "", kernel)


# ------------------------------------------------------------------------------------------------------- words


def _leaf_source(a: Leaf, b: Leaf) -> _Source:
    changed_since_start = (a.initial or a.digest.value) == (b.initial or b.digest.value) and (a.initial or b.initial)
    if changed_since_start:
        detail = f"{a.id} was written behind torch's back before it was first read"
        return _Source("outside", a.id, a.position, detail, a.digest.value, b.digest.value, opaque_producer=True)
    origin = {"input": "input", "parameter": "state", "buffer": "state"}.get(a.kind, "outside")
    detail = {
        "input": f"the model input {a.id} differs before the first op",
        "state": f"the {a.kind} {a.id.partition('/')[2]} differs before the first op",
    }.get(origin, "a tensor that no recorded op wrote has other content")
    return _Source(origin, a.id, a.position, detail, a.digest.word(), b.digest.word())


def _kernel_source(node: str, at: int, a: OpRecord, b: OpRecord) -> _Source:
    names = [place for place, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=False)) if x != y]
    which = f"output {', '.join(map(str, names))}" if names and len(a.outputs) > 1 else "the output"
    detail = f"{which} differs although every input is equal"
    return _Source("kernel", node, at, detail, _left(a), _left(b))


def _left(record: OpRecord) -> str:
    """All that a record left, as text."""
    return " ".join(found.word() for found in record.outputs) + record.scalar


def _seen(record: OpRecord | None) -> str:
    return "absent" if record is None else f"{record.op}({record.arguments})"


def _name(record: OpRecord) -> str:
    """The op without namespace and overload: ``add_`` of ``aten.add_.Tensor``."""
    return record.op.partition(".")[2].partition(".")[0]


def _wiring(record: OpRecord) -> str:
    return ", ".join(f"{ref.argument}={ref.source}" + (f"+{ref.offset}" if ref.offset else "") for ref in record.inputs)


def _read_the_same(a: OpRecord, b: OpRecord) -> bool:
    """Whether two calls read tensors of equal digests, argument by argument."""
    if not a.inputs or len(a.inputs) != len(b.inputs):
        return False
    return all(x.digest and x.digest == y.digest for x, y in zip(a.inputs, b.inputs, strict=True))


def _short(node: str) -> str:
    return node.rpartition("/")[2] or node


def _words(arguments: str) -> set[str]:
    return set(re.split(r"[\s,=\[\]]+", arguments))


def _returned(records: tuple[OpRecord | None, OpRecord | None], value: str) -> bool:
    return any(record is not None and record.scalar == value for record in records)


def _content(result: Result | None) -> tuple[object, ...] | None:
    return None if result is None else tuple(result.digest)
