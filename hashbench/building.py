"""From the raw records of a run to its :class:`~hashbench.records.Trace`: ids, references by id, texts.

Done once, after the run, so that the tracing mode's hot path does not pay for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hashbench.arguments import argument_text
from hashbench.digest import RawDigest, readable
from hashbench.records import Leaf, OpRecord, Ref, Result, SettingsMark, TensorDigest, Trace

RawLeaf = tuple[str, str, RawDigest, int, RawDigest | None]
"""``(kind, name, digest, position of the first reader, digest at registration if that was another)``"""

RawResult = tuple[str, TensorDigest, int | None]
"""``(name, digest, number of the writer)``"""


def build_trace(
    records: Sequence[tuple[Any, ...]],
    leaves: Sequence[RawLeaf],
    results: Sequence[RawResult],
    *,
    marks: tuple[SettingsMark, ...],
    notes: Mapping[int, Mapping[str, Any]],
    hashed_inputs: bool,
    first_sequence: int = 0,
) -> Trace:
    """Give every record its id, turn numbers into ids, and backward records into children of their forward op.

    Autograd nodes numbered below ``first_sequence`` were made before the trace, so no record is their forward op.
    """
    ids = _Ids(_leaf_ids(leaves))
    built: list[OpRecord] = []
    forward_records: dict[int, int] = {}
    for number, raw in enumerate(records):
        phase, sequence = raw[1], raw[4]
        forward = None
        if phase == "backward":
            place = forward_records.get(sequence)
            forward = built[place] if place is not None else None
        elif sequence >= first_sequence:
            forward_records.setdefault(sequence, number)
        built.append(_build_record(raw, ids, forward, notes.get(number, {})))
    return Trace(
        records=tuple(built),
        leaves=tuple(map(_build_leaf, ids.leaves, leaves)),
        results=tuple(Result(name, found, "" if node is None else ids.of(node)) for name, found, node in results),
        marks=marks,
        hashed_inputs=hashed_inputs,
    )


class _Ids:
    """Record ids: phase, iteration, module and op, and a count within these, so that an insertion in one module does
    not rename what comes after it elsewhere."""

    def __init__(self, leaves: Sequence[str]) -> None:
        self.leaves = leaves
        self.records: list[str] = []
        self.counts: Counter[tuple[str, int, str, str]] = Counter()

    def make(self, phase: str, iteration: int, module: str, op: str) -> str:
        key = (phase, iteration, module, op)
        count = self.counts[key]
        self.counts[key] = count + 1
        self.records.append(f"{phase}.{iteration}/{module}/{op}#{count}")
        return self.records[-1]

    def of(self, node: int) -> str:
        return self.records[node] if node >= 0 else self.leaves[-node - 1]


def _build_record(raw: tuple[Any, ...], ids: _Ids, forward: OpRecord | None, notes: Mapping[str, Any]) -> OpRecord:
    plan, phase, iteration, module, _, reads, others, written, scalar, rng = raw
    if forward is not None and forward.module.startswith(module):
        module = forward.module  # else a module is being called in backward: it computes its forward again
    digests = notes.get("inputs", {})
    inputs = tuple(
        [
            Ref(str(place), ids.of(node), at, plan.writes(place), _value_of(digests.get(str(place))))
            for place, node, at in zip(reads[0::3], reads[1::3], reads[2::3], strict=True)
        ]
    )
    return OpRecord(
        id=ids.make(phase, iteration, module, plan.name),
        phase=phase,
        iteration=iteration,
        module=module,
        op=plan.name,
        inputs=inputs,
        arguments=argument_text(others),
        outputs=tuple([readable(found) for found in written]),
        scalar="" if scalar is None else repr(scalar),
        rng="" if rng is None else f"{rng:016x}",
        forward_op=forward.id if forward is not None else "",
        blank=any(found[3] is None for found in written),
        source=(forward.source if forward is not None else "") or notes.get("source", ""),
    )


def _value_of(found: RawDigest | None) -> str:
    return "" if found is None else readable(found).value


def _leaf_ids(leaves: Sequence[RawLeaf]) -> list[str]:
    """``kind/name``, with a count where several leaves share it and always for those that no model or caller named."""
    counts: Counter[tuple[str, str]] = Counter()
    ids = []
    for kind, name, *_ in leaves:
        count = counts[kind, name]
        counts[kind, name] = count + 1
        ids.append(f"{kind}/{name}#{count}" if count or kind == "other" else f"{kind}/{name}")
    return ids


def _build_leaf(leaf_id: str, leaf: RawLeaf) -> Leaf:
    kind, _, found, position, initial = leaf
    return Leaf(leaf_id, kind, readable(found), position, "" if initial is None else readable(initial).value)
