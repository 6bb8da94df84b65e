"""Queries on a finished trace: statistics, tensor flow, where a hash was written and read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hashbench.records import OpRecord, Ref, TensorDigest, Trace


def stats(trace: Trace) -> dict[str, Any]:
    """``total_ops``, ``tensor_ops`` (that read or wrote a tensor), ``unique_tensors`` (set of digests) and
    ``operation_types`` (calls by op)."""
    return {
        "total_ops": len(trace.records),
        "tensor_ops": sum(1 for record in trace.records if record.inputs or record.outputs),
        "unique_tensors": {found.value for record in trace.records for found in record.outputs if found.value},
        "operation_types": Counter(record.op for record in trace.records),
    }


def summary(trace: Trace, *, top: int = 10) -> str:
    """How many ops of which kind there are, the ``top`` most frequent ones a line each."""
    found = stats(trace)
    lines = [f"{found['total_ops']} ops, {len(found['unique_tensors'])} different tensors"]
    return "\n".join(lines + [f"{count:7d}  {name}" for name, count in found["operation_types"].most_common(top)])


def tensor_flow(trace: Trace) -> list[dict[str, Any]]:
    """One entry per record: ``operation``, ``op_id``, ``inputs`` (ids of the writers), ``outputs`` (digests)."""
    return [
        {
            "operation": record.op,
            "op_id": record.id,
            "module": record.module,
            "inputs": [ref.source for ref in record.inputs],
            "outputs": [found.word() for found in record.outputs],
        }
        for record in trace.records
    ]


def stack_log(trace: Trace) -> list[dict[str, Any]]:
    """One entry per record: ``id`` (from 1), ``func``, ``op_id``, ``caller`` (with ``source_lines=True``, else empty),
    ``args`` (text of what is no tensor), and ``arg_tensors``, what each argument was when it was written last."""
    written: dict[str, tuple[TensorDigest, ...]] = {leaf.id: (leaf.digest,) for leaf in trace.leaves}
    entries = []
    for number, record in enumerate(trace.records, start=1):
        entries.append(
            {
                "id": number,
                "func": record.op,
                "op_id": record.id,
                "caller": record.source,
                "args": record.arguments,
                "arg_tensors": [_argument(ref, written.get(ref.source, ())) for ref in record.inputs],
            }
        )
        written[record.id] = record.outputs
    return entries


def _argument(ref: Ref, digests: tuple[TensorDigest, ...]) -> dict[str, Any]:
    """Of a writer with several outputs the trace does not say which was read: the hashes of all are named then."""
    return {
        "argument": ref.argument,
        "written_by": ref.source,
        "hash": ref.digest or " ".join(found.value or "blank" for found in digests),
        "shape": digests[0].shape if len(digests) == 1 else None,
        "dtype": digests[0].dtype if len(digests) == 1 else "",
    }


def find_by_hash(trace: Trace, value: str) -> list[dict[str, str]]:
    """Where a digest (its text, or its beginning) was written and read: ``op_id``, ``operation``, ``role``."""
    if not value:
        return []
    owners = {leaf.id for leaf in trace.leaves if leaf.digest.value.startswith(value)}
    found = [{"op_id": leaf, "operation": "", "role": "leaf"} for leaf in sorted(owners)]
    for record in trace.records:
        if any(ref.source in owners for ref in record.inputs):
            found.append(_place(record, "input"))
        if any(output.value.startswith(value) for output in record.outputs if output.value):
            owners.add(record.id)
            found.append(_place(record, "output"))
    return found


def _place(record: OpRecord, role: str) -> dict[str, str]:
    return {"op_id": record.id, "operation": record.op, "role": role}
