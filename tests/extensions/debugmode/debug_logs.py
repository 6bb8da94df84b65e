"""Logs of DebugMode written by hand, in the format of ``save_logs``."""

from __future__ import annotations

import json
import math
from typing import Any

from hashbench.extensions.debugmode.log import FORMAT, VERSION, DebugLog, loads

Entry = dict[str, Any]


def serialised(value: Any) -> Entry:
    """A value as torch's ``_serialize_debug_value`` writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"type": "nonfinite_float", "value": str(value)}
    if isinstance(value, tuple | list):
        return {"type": type(value).__name__, "items": [serialised(item) for item in value]}
    if isinstance(value, dict):
        return {"type": "dict", "items": [[name, serialised(item)] for name, item in value.items()]}
    return {"type": "scalar", "value": value}


def op(name: str, *read: Any, left: Any = 1.0, unhashed: bool = False, **fields: Any) -> Entry:
    """A call of the op ``aten::name`` with the hashes of its tensors; ``unhashed``: of its inputs there are none."""
    hashes = {} if unhashed or not read else {"input_hash": (read, {})}
    text = {"args_str": ", ".join(["t: f32[2]"] * len(read)), "kwargs_str": "", "output_str": "  ->  t: f32[2]"}
    full = name if "::" in name else f"aten::{name}"
    log = serialised({**hashes, "hash": left})
    return _entry(type="op", op_name=full, **{"log": log, **text, **fields})


def empty(**fields: Any) -> Entry:
    """An allocation, which DebugMode never hashes."""
    return op("empty.memory_format", **{"log": serialised({}), "args_str": "[2]", **fields})


def kernel(name: str, before: dict[str, Any] | None, after: dict[str, Any]) -> Entry:
    """A Triton kernel with the hashes of its arguments before and after it."""
    hashes = {"pre_hashes": None if before is None else serialised(before), "post_hashes": serialised(after)}
    return _entry(type="triton_kernel", kernel_name=name, kwargs_str="in_ptr0=t: f32[2]", **hashes)


def annotate(tag: str, header: str = "record function", **fields: Any) -> Entry:
    return _entry(type="annotate", tag=tag, header=header, **{"call_depth": 0, **fields})


def redistribute(source: str, target: str) -> Entry:
    places = {"src_placement_str": source, "dst_placement_str": target, "transform_info_str": None}
    return _entry(type="redistribute", arg_str="1", is_explicit=False, is_outer_call=True, **places)


def _entry(**fields: Any) -> Entry:
    common = {"call_depth": 1, "log": None, "output_str": None, "stack_trace": None, "fwd_stack_trace": None}
    return {**common, **fields}


def document(*entries: Entry, **fields: Any) -> str:
    """The text of a log."""
    return json.dumps({"format": FORMAT, "version": VERSION, "logs": list(entries), **fields}, allow_nan=False) + "\n"


def log(*entries: Entry) -> DebugLog:
    return loads(document(*entries))
