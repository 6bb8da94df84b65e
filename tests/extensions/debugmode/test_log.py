"""The reader of DebugMode's logs: every kind of call, modules, and what is no such log."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.debugmode.log import DebugLog, is_debug_log, loads
from tests.extensions.debugmode.debug_logs import annotate, document, empty, kernel, log, op, redistribute, serialised
from tests.fuzzing import DEEP, ODD_VALUES, damaged


def test_hashes_are_known_by_argument_and_path() -> None:
    both = op("add.Tensor", (1.5, 7), None, left=[(2.0, 3), (float("nan"), 0)])
    (call,) = log(both).calls
    assert call.inputs == {"0.0": "1.5", "0.1": "7"}
    assert call.outputs == {"0.0": "2.0", "0.1": "3", "1.0": "nan", "1.1": "0"}


def test_a_keyword_argument_is_known_by_its_name() -> None:
    entry = op("add.out", 1.0)
    entry["log"] = serialised({"input_hash": ((1.0,), {"out": 5.0, "alpha": None}), "hash": 2.0})
    assert log(entry).calls[0].inputs == {"0": "1.0", "out": "5.0"}


def test_an_op_without_tensors_reads_nothing() -> None:
    calls = log(op("ones"), op("neg", 1.0), empty()).calls
    assert [call.inputs for call in calls] == [{}, {"0": "1.0"}, None]
    assert [call.inputs for call in log(op("ones"), op("neg", 1.0, unhashed=True, args_str="t: f32[2]")).calls] == [
        {},
        None,
    ]


def test_numbers_of_tensors_and_addresses_are_no_difference() -> None:
    first, second = (
        op(
            "add.Tensor",
            1.0,
            args_str=f"t${n}: f32[2], <Generator object at 0x7f{n}>",
            output_str=f"  ->  t${n}: f32[2]",
        )
        for n in (3, 12)
    )
    assert log(first).calls == log(second).calls
    assert log(first).calls[0].arguments == "t: f32[2], <Generator object at 0x…>"


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ((1.0, float("inf"), 1e22), {"float"}),
        ((3, 0), {"int"}),
        ((True, "x"), {"other"}),
        (((1.0, 2),), {"float", "int"}),
    ],
    ids=["norm", "hash_tensor", "a function of one's own", "both"],
)
def test_the_hash_function_is_known_by_its_values(values: Any, kinds: set[str]) -> None:
    assert log(*(op("neg", 1.0, left=value) for value in values)).hash_kinds == kinds


def test_a_call_is_in_the_module_that_has_not_ended() -> None:
    dtensor = {"args_str": "dt: f32[8, 8]| S(0)"}
    entries = [
        annotate("step"),
        annotate("Net", "nn.Mod", call_depth=2),
        annotate("Net.fc", "nn.Mod", call_depth=3),
        op("addmm", 1.0, call_depth=4),
        annotate("inside", call_depth=3),
        op("mul", 1.0, call_depth=5),
        op("relu", 1.0, call_depth=3),
        op("sum", 1.0, call_depth=2),
        annotate("Net", "nn.Mod", call_depth=1),
        op("mm", 1.0, call_depth=1, **dtensor),
        op("mm", 1.0, call_depth=2),
        op("ones", call_depth=1),
    ]
    told = [(call.name, call.module) for call in log(*entries).calls if "::" in call.name]
    assert told == [
        ("aten::addmm", "Net.fc"),
        ("aten::mul", "Net.fc"),
        ("aten::relu", "Net"),
        ("aten::sum", ""),
        ("aten::mm", "Net"),
        ("aten::mm", "Net"),
        ("aten::ones", ""),
    ]


def test_the_source_is_the_innermost_line_of_the_user() -> None:
    stack = (
        '  File "/home/me/train.py", line 3, in <module>\n    main()\n'
        '  File "/home/me/net.py", line 18, in forward\n    return self.fc(x)\n'
        '  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear\n    x\n'
    )
    calls = log(op("mm", 1.0, stack_trace=stack), op("mm", 1.0, stack_trace="x", fwd_stack_trace=stack), op("mm")).calls
    assert [call.source for call in calls] == ["net.py:18 forward", "net.py:18 forward", ""]


def test_every_kind_of_call_is_read() -> None:
    placement = {"type": "output_placement", "placements_str": "S(0)", "call_depth": 2, "log": None}
    calls = log(
        kernel("fused_0", {"in_ptr0": 1.0}, {"in_ptr0": 1.0, "out_ptr0": 2.0}), redistribute("S(0)", "R"), placement
    )
    assert [(call.kind, call.name) for call in calls.calls] == [
        ("triton_kernel", "fused_0"),
        ("redistribute", "redistribute_input"),
        ("output_placement", "output placement"),
    ]
    assert calls.calls[0].outputs == {"in_ptr0": "1.0", "out_ptr0": "2.0"}
    assert calls.calls[1].arguments == "1, S(0), R, , is_outer_call"


SOUND = document(
    annotate("step"), op("add.Tensor", 1.5, 2.0, left=(3.5, 7)), kernel("k", {"a": 1.0}, {"a": float("nan")})
)

REFUSED = {
    "an older or newer version": (document(version=2), "version 2, this hashbench reads 1: another torch wrote it"),
    "a version in words": (document(version=True), "version True"),
    "another format": (document(format="x"), "not a log of DebugMode.save_logs"),
    "a list": ("[1, 2]", "not a log of DebugMode.save_logs"),
    "an unknown kind of call": (document({"type": "graph", "call_depth": 1}), "call 0 is of an unknown kind, 'graph'"),
    "a call without a depth": (document({**op("mm"), "call_depth": None}), "call 0 has no depth"),
    "a call without a name": (document({**op("mm"), "op_name": 3}), "call 0 has no text 'op_name'"),
    "a hash of an unknown kind": (
        document({**op("mm"), "log": {"type": "tensor"}}),
        "call 0 has a log that is no dict",
    ),
    "a value twice": (
        document(
            {**op("mm"), "log": {"type": "dict", "items": [["hash", serialised(1.0)], ["hash", serialised(2.0)]]}}
        ),
        "call 0 has 'hash' twice",
    ),
    "a number that no JSON has": (SOUND.replace("1.5", "NaN"), "a number that no JSON has"),
    "no calls": ('{"format": "torch.utils._debug_mode.DebugMode.logs", "version": 1}', "no list of calls"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_log_of_this_version_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(HashbenchError, match=r"cannot read the DebugMode log run\.json") as refused:
        loads(text, name="run.json")
    assert reason in str(refused.value)
    assert "nothing was compared" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trace_of_ours_is_no_such_log() -> None:
    assert is_debug_log(SOUND)
    assert not is_debug_log("hashbench-trace\t9\tfast")
    assert not is_debug_log("")


def test_no_part_of_a_log_is_read_as_a_whole_one() -> None:
    whole = SOUND.rstrip()
    loads(whole)
    for length in range(1, len(whole)):
        with pytest.raises(HashbenchError):
            loads(whole[:length])


def test_a_damaged_log_is_refused_or_read_as_what_it_says() -> None:
    for seed in range(10):
        for name, content in damaged(SOUND.encode(), seed=seed):
            _refused_or_other(content.decode(errors="replace"), name)


def test_an_odd_value_anywhere_is_refused_or_read() -> None:
    rng = random.Random(0)
    for place, value in [(place, rng.choice(ODD_VALUES)) for place in _places(json.loads(SOUND)) for _ in range(4)]:
        altered = json.loads(SOUND)
        _put(altered, place, copy.deepcopy(value))
        _refused_or_other(json.dumps(altered), f"{value!r:.30} at {place}")


def test_values_without_end_are_refused() -> None:
    deep = op("mm")
    text = document(deep).replace('{"type": "scalar", "value": 1.0}', '{"type": "tuple", "items": [' * DEEP)
    for sample in (text, document({**deep, "log": _nested(400)})):
        with pytest.raises(HashbenchError):
            loads(sample)


def _nested(levels: int) -> dict[str, Any]:
    value = serialised(1.0)
    for _ in range(levels):
        value = {"type": "tuple", "items": [value]}
    return {"type": "dict", "items": [["hash", value]]}


def _refused_or_other(text: str, name: str) -> None:
    try:
        read = loads(text)
    except HashbenchError:
        return
    assert isinstance(read, DebugLog), name


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(item, (*path, name))


def _put(document_: Any, place: tuple[Any, ...], value: Any) -> None:
    for name in place[:-1]:
        document_ = document_[name]
    document_[place[-1]] = value
