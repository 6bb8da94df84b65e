"""Two traces to a verdict: where did the difference enter that reached the results?

Pure: imports no torch, reads no files. The rules are those of the table in ``docs/design.md``, "The verdict on a pair":

1. align the two runs (``alignment``);
2. for every pair of records, decide whether what it *wrote* differs, and if so whether it *introduced* the difference (and
   how: its origin) or only passed on what it read;
3. from the results that differ, walk back through whatever differs (the causal slice); the first introduction in it is the
   divergence. Records that differ outside the slice are benign.

Nodes are ids of records and leaves of the first run; what only the second run has is a node too, with ``2:`` before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hashbench.alignment import align
from hashbench.records import (
    Divergence,
    HashbenchError,
    Leaf,
    OpRecord,
    Ref,
    Result,
    Steering,
    TensorDigest,
    Trace,
    Verdict,
)

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
    """A difference that entered at a node: the origin, what to call it, and where in the first run it is."""

    origin: str
    node: str
    position: int
    detail: str
    first: str
    second: str
    opaque_producer: bool = False


_RANK = {"input": 0, "state": 1}
"""Origins that lie before the first op, wherever the tensor is first read."""


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
        self.edges: dict[str, set[str]] = {}
        self.sources: dict[str, _Source] = {}
        self.odd_views: dict[str, str] = {}
        self.scalars: list[str] = []
        self._map_nodes()
        self._judge_leaves()
        for node in self.records:
            self._judge_record(node)

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
        self.edges[node] = set(self._reads(a, b))
        if a is None or b is None:
            self._judge_unmatched(node, a, b)
            return
        wrote_differently = a.outputs != b.outputs or a.scalar != b.scalar
        source = self._introduced(node, a, b, wrote_differently)
        is_view = not a.outputs and not b.outputs and not a.scalar and not b.scalar
        if is_view and source is not None:
            self.differs.add(node)
            self.sources[node] = source
            for ref in a.inputs:
                self.odd_views[ref.source] = node
            return
        if a.scalar != b.scalar:
            self.scalars.append(node)
        if wrote_differently:
            self.differs.add(node)
            self.tainted.add(node)
            if source is not None:
                self.sources[node] = source
        elif self._leaves_taint(a):
            self.tainted.add(node)

    def _reads(self, a: OpRecord | None, b: OpRecord | None) -> Iterator[str]:
        if a is not None:
            yield from (ref.source for ref in a.inputs)
        if b is not None:
            yield from (self.node_of_b[ref.source] for ref in b.inputs)

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
        if not record.outputs and not record.scalar:
            for ref in record.inputs:
                self.odd_views[ref.source if a is not None else self.node_of_b[ref.source]] = node

    def _introduced(self, node: str, a: OpRecord, b: OpRecord, wrote_differently: bool) -> _Source | None:
        """How this pair of records introduced a difference; ``None`` where it only passed one on, or has none."""
        at = self.position[node]
        if a.rng != b.rng:
            detail = "the random generator was in another state before this op"
            return _Source("rng", node, at, detail, f"generator state {a.rng}", f"generator state {b.rng}")
        if a.arguments != b.arguments and not self._explained_by_scalar(node, a, b):
            detail = "an argument that is not a tensor has another value"
            return _Source("outside", node, at, detail, f"({a.arguments})", f"({b.arguments})")
        behind = self._written_behind(node, a, b) if wrote_differently else None
        if behind is not None:
            return behind
        if self._wired_differently(a, b):
            return self._blame_view(a, b) or _Source(
                "sequence", node, at, "it reads another tensor than in the first run", _wiring(a), _wiring(b)
            )
        if wrote_differently and not self._read_a_difference(a, b):
            return self._blame_view(a, b) or self._blame_memory(node, a) or _kernel_source(node, at, a, b)
        return None

    def _explained_by_scalar(self, node: str, a: OpRecord, b: OpRecord) -> bool:
        """Whether the arguments differ by a scalar that an earlier record returned (``.item()``): then it flowed from there."""
        words_a, words_b = _words(a.arguments), _words(b.arguments)
        for name in reversed(self.scalars):
            old, new = self.records[name]
            if old is not None and new is not None and old.scalar in words_a and new.scalar in words_b:
                self.edges[node].add(name)
                return True
        return False

    def _wired_differently(self, a: OpRecord, b: OpRecord) -> bool:
        if len(a.inputs) != len(b.inputs):
            return True
        for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
            same_leaf_kind = ref_a.source == self.node_of_b[ref_b.source]
            if not same_leaf_kind or ref_a.offset != ref_b.offset or ref_a.argument != ref_b.argument:
                return True
        return False

    def _read_a_difference(self, a: OpRecord, b: OpRecord) -> bool:
        """Whether any input differed, by its content where that was hashed and else by its last writer."""
        if self.hashed:
            return any(x.digest != y.digest for x, y in zip(a.inputs, b.inputs, strict=True) if not self._is_target(x))
        return any(ref.source in self.tainted for ref in a.inputs)

    def _is_target(self, ref: Ref) -> bool:
        """Whether ``ref`` is fresh memory that the op fills: its old content is blank and says nothing."""
        return ref.written and self._is_blank(ref.source)

    def _is_blank(self, node: str) -> bool:
        record = self.records.get(node, (None, None))[0]
        return record is not None and record.blank

    def _written_behind(self, node: str, a: OpRecord, b: OpRecord) -> _Source | None:
        """An input whose content differs although whatever wrote it last, as far as torch knows, agreed in both runs."""
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

    def _blame_view(self, a: OpRecord, b: OpRecord) -> _Source | None:
        """A view of an input that was taken differently (another slice, another order) is to blame, not its reader."""
        read = [ref.source for ref in a.inputs] + [self.node_of_b[ref.source] for ref in b.inputs]
        view = next((self.odd_views[name] for name in read if name in self.odd_views), None)
        return None if view is None else self.sources.get(view)

    def _blame_memory(self, node: str, a: OpRecord) -> _Source | None:
        """An op whose inputs are equal but for memory that nobody wrote: the allocation is to blame."""
        if a.blank:
            return None
        blank = next((r.source for r in a.inputs if not r.written and self._is_blank(r.source)), None)
        return None if blank is None else self._unwritten_memory(blank)

    def _unwritten_memory(self, name: str) -> _Source | None:
        """The allocation behind a tensor, if no recorded write since then covered all of it."""
        for step, record in self._writers(name):
            if record.blank:
                detail = "memory that this op allocated was read before it was written"
                return _Source("kernel", step, self.position[step], detail, "uninitialised", "uninitialised")
            size = max((_elements(found) for found in record.outputs), default=0)
            if any(size >= self._size(ref.source) for ref in record.inputs if ref.written):
                return None
        return None

    def _writers(self, name: str) -> Iterator[tuple[str, OpRecord]]:
        """The record that wrote a storage last, the one before it, and so on back to the op that allocated it."""
        seen: set[str] = set()
        step: str | None = name
        while step is not None and step not in seen:
            seen.add(step)
            record = self.records.get(step, (None, None))[0]
            if record is None:
                return
            yield step, record
            step = next((ref.source for ref in record.inputs if ref.written), None)

    def _size(self, name: str) -> int:
        """Elements of the whole tensor that ``name`` is or wrote into."""
        sizes = [max((_elements(found) for found in record.outputs), default=0) for _, record in self._writers(name)]
        leaf = self.leaves_a.get(name)
        return max([*sizes, _elements(leaf.digest) if leaf is not None else 0], default=0)

    def _leaves_taint(self, a: OpRecord) -> bool:
        """Whether a write into part of a tensor leaves a difference in the rest of it."""
        size = max((_elements(found) for found in a.outputs), default=0)
        return any(r.written and r.source in self.tainted and size < self._size(r.source) for r in a.inputs)

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
            reached |= self._slice(self.scalars)  # a scalar reaches the results also by choosing what is run
        benign = tuple(node for node in self.records if node in self.differs - reached and self._wrote(node))
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
            waiting.extend(name for name in self.edges.get(node, ()) if name in self.tainted or name in self.differs)
        return reached

    def _choose(self, reached: set[str]) -> _Source | None:
        candidates = [self.sources[node] for node in reached if node in self.sources]
        settings = self._settings_source()
        if settings is not None and all(settings.position <= source.position for source in candidates):
            early = [source for source in candidates if source.origin in _RANK]
            candidates = early or [settings]
        order = {node: place for place, node in enumerate([*self.leaves_a, *self.records])}
        return min(
            candidates,
            key=lambda source: (_RANK.get(source.origin, 2), source.position, order.get(source.node, 0)),
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
        shown = ["absent" if x is None else x.digest.value for x in (a, b)]
        return _Source("outside", writer, at, detail, *shown, opaque_producer=bool(writer))

    def _divergence(self, source: _Source) -> Divergence:
        a, b = self.records.get(source.node, (None, None))
        record = a or b
        if record is None and self.first.records:
            record = self.first.records[min(source.position, len(self.first.records) - 1)]
        steering = self._steering(source) if source.origin in ("sequence", "outside") else None
        found = Divergence(
            origin=source.origin,
            node=source.node.removeprefix(_SECOND),
            kernel=record.op if record is not None and source.origin != "settings" else "",
            op_index=source.position if record is not None else None,
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
        chosen = self._choose_source_of(name)
        kernel = ""
        if chosen is not None:
            record = next((r for r in self.records.get(chosen.node, ()) if r is not None), None)
            kernel = record.op if record is not None else chosen.node
        return Steering(name, old.scalar if old else "", new.scalar if new else "", kernel)

    def _choose_source_of(self, name: str) -> _Source | None:
        candidates = [self.sources[node] for node in self._slice([name]) if node in self.sources]
        return min(candidates, key=lambda found: (_RANK.get(found.origin, 2), found.position), default=None)


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
    return _Source(origin, a.id, a.position, detail, _shown(a.digest), _shown(b.digest))


def _kernel_source(node: str, at: int, a: OpRecord, b: OpRecord) -> _Source:
    names = [place for place, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=False)) if x != y]
    which = f"output {', '.join(map(str, names))}" if names and len(a.outputs) > 1 else "the output"
    detail = f"{which} differs although every input is equal"
    shown = [" ".join(map(_shown, record.outputs)) + record.scalar for record in (a, b)]
    return _Source("kernel", node, at, detail, *shown)


def _shown(digest: TensorDigest) -> str:
    return f"{digest.dtype}[{','.join(map(str, digest.shape))}]:{digest.value or 'blank'}"


def _seen(record: OpRecord | None) -> str:
    return "absent" if record is None else f"{record.op}({record.arguments})"


def _wiring(record: OpRecord) -> str:
    return ", ".join(f"{ref.argument}={ref.source}" + (f"+{ref.offset}" if ref.offset else "") for ref in record.inputs)


def _short(node: str) -> str:
    return node.rpartition("/")[2] or node


def _words(arguments: str) -> set[str]:
    return set(re.split(r"[\s,=\[\]]+", arguments))


def _returned(records: tuple[OpRecord | None, OpRecord | None], value: str) -> bool:
    return any(record is not None and record.scalar == value for record in records)


def _content(result: Result | None) -> tuple[object, ...] | None:
    return None if result is None else tuple(result.digest)


def _elements(digest: TensorDigest) -> int:
    return math.prod(digest.shape)
