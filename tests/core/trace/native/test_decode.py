"""What the recorder reads of a call's arguments by the schema is what the Python tracer reads of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hashbench import HashDebugTrace
from hashbench.core.native.library import NATIVE_KEY
from hashbench.core.records import OpRecord
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")

X, Y = torch.arange(3.0), torch.ones(3)
PART = torch.ones(6)[2:5]
_NAMES = "hashbench_arguments"
_VALUES = 'Tensor x, int i=3, float d=1.5, bool t=True, bool f=False, str s="mean", int[] l=[1, 2], float? n=None'
_SCHEMAS = (
    f"values({_VALUES}) -> Tensor",
    f"named(*, {_VALUES}) -> Tensor",
    "one(Tensor x, *, int i=3) -> Tensor",
    "usual(int i=3, Tensor? x=None) -> Tensor",
    "without(Tensor x, int i, float d, bool t, str s, int[] l) -> Tensor",
    "lists(Tensor[] each, Tensor?[] some, Tensor[]? maybe, bool[2] mask) -> Tensor",
    "written(Tensor(a!)[] each) -> ()",
    "several(Tensor x) -> (Tensor, int)",
    "made(Tensor x) -> Tensor[]",
)


def _copied(*given: Any, **named: Any) -> torch.Tensor:
    """A kernel of which nothing else is recorded."""
    first = named["x"] if "x" in named else given[0]
    with untraced():
        return (first[0] if isinstance(first, list) else first).clone()


def _written(each: list[torch.Tensor]) -> None:
    with untraced():
        for tensor in each:
            tensor.add_(1)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    library = torch.library.Library(_NAMES, "DEF")
    kernels: dict[str, Any] = {"written": _written, "several": lambda x: (_copied(x), 1)}
    kernels |= {"made": lambda x: [_copied(x), _copied(x)], "usual": lambda *_: _copied(X)}
    for schema in _SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, kernels.get(name, _copied), "CompositeExplicitAutograd")
    yield getattr(torch.ops, _NAMES)
    library._destroy()


CALLS: dict[str, Any] = {
    "all usual": lambda ops: ops.values(X),
    "all usual and said": lambda ops: ops.values(X, 3, 1.5, True, False, "mean", [1, 2], None),
    "another int": lambda ops: ops.values(X, 4),
    "no int": lambda ops: ops.values(X, 0),
    "another float": lambda ops: ops.values(X, 3, 2.5),
    "a float of nothing": lambda ops: ops.values(X, 3, 0.0),
    "false for true": lambda ops: ops.values(X, 3, 1.5, False),
    "true for false": lambda ops: ops.values(X, t=True, f=True),
    "another text": lambda ops: ops.values(X, s="sum"),
    "another list": lambda ops: ops.values(X, l=[1, 3]),
    "an empty list": lambda ops: ops.values(X, l=[]),
    "large sizes": lambda ops: ops.values(X, l=[2**40, -1, 300]),
    "a float for none": lambda ops: ops.values(X, n=0.5),
    "usual by name": lambda ops: ops.named(x=X, i=3, d=1.5, t=True, f=False, s="mean", l=[1, 2], n=None),
    "others by name": lambda ops: ops.named(x=X, i=0, d=0.0, t=False, f=True, s="sum", l=[2, 1], n=1.0),
    "one by name": lambda ops: ops.named(x=X, f=True),
    "only by name": lambda ops: ops.one(X, i=4),
    "the first is usual": lambda ops: ops.usual(3, None),
    "nothing is usual": lambda ops: ops.without(X, 0, 0.0, False, "", []),
    "a list of tensors": lambda ops: ops.lists([X, Y], [], None, [True, False]),
    "a list with none": lambda ops: ops.lists([X], [None, Y, None, X], None, [True, True]),
    "a list of none": lambda ops: ops.lists([X], [None, None], None, [False, True]),
    "a list that may be none": lambda ops: ops.lists([X], [], [Y, X], [False, False]),
    "an empty list that may be none": lambda ops: ops.lists([X], [], [], [True, False]),
    "a list that is written": lambda ops: ops.written([torch.ones(2), torch.zeros(2)]),
    "a tensor and a number": lambda ops: ops.several(X),
    "a list that is returned": lambda ops: ops.made(X),
    "a number in place of a tensor": lambda _: torch.where(X > 1, X, 2.5),
    "an index that leaves out a dimension": lambda _: torch.ones(3, 3)[:, torch.tensor([0, 2])],
    "an empty list in the middle": lambda _: torch.ones(2).sum([], dtype=torch.float64),
    "a gradient that is not asked for": lambda _: torch.ops.aten.convolution_backward(
        *(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), None),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]),
    ),
    "statistics without a flag": lambda _: torch.ops.aten.batch_norm_update_stats(
        torch.rand(2, 3), torch.zeros(3), torch.ones(3), 0.5
    ),
    "another device": lambda _: torch.ones(2, device="meta"),
}


def _last(tracer: str, call: Any, ops: Any) -> OpRecord:
    """The record of the program's own call."""
    with HashDebugTrace(tracer=tracer) as trace:
        call(ops)
    return trace.finish().records[-1]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_records_match_the_python_tracer(call: Any, ops: Any) -> None:
    native, python = _last("native", call, ops), _last("python", call, ops)
    assert native.op == python.op
    assert native.arguments == python.arguments
    assert native.scalar == python.scalar
    assert [ref.argument for ref in native.inputs] == [ref.argument for ref in python.inputs]
    assert [output.shape for output in native.outputs] == [output.shape for output in python.outputs]


UNBOXED: dict[str, Any] = {
    "sizes": lambda: X.view(3, 1),
    "no sizes": lambda: torch.ones(1).view([]),
    "sizes by their usual": lambda: X.expand(2, 3),
    "sizes, and another flag": lambda: torch.ops.aten.expand(X, [2, 3], implicit=True),
    "a flag that is always said": lambda: torch.ops.aten._softmax(X, 0, False),
    "two lists": lambda: X.as_strided([2], [1]),
    "two lists and an offset": lambda: X.as_strided([2], [1], 1),
    "only tensors": lambda: X.t(),
    "ints": lambda: torch.ones(2, 3).transpose(0, -1),
    "ints that may be none": lambda: torch.ops.aten.slice(X, 0, None, None, 2),
    "an int that is usual": lambda: torch.ops.aten.slice(X, 0, 1, None, 1),
    "an alpha that is usual": lambda: torch.add(X, Y),
    "an alpha": lambda: torch.add(X, Y, alpha=2),
    "an alpha of another kind": lambda: torch.add(X, Y, alpha=1.0),
    "a number in place of a tensor": lambda: X * 2.5,
    "a whole number in place of a tensor": lambda: X + 2,
    "a flag in place of a tensor": lambda: X * True,
    "a complex number": lambda: torch.ops.aten.div.Scalar(X, 2j),
    "scalars": lambda: torch.addmm(torch.ones(1), torch.ones(2, 2), torch.ones(2, 2), beta=0, alpha=0.5),
    "a scalar that is a flag": lambda: torch.zeros(2).fill_(True),
    "a written argument": lambda: torch.zeros(3).add_(X),
    "a written argument that is also read": lambda: (y := torch.ones(3)).mul_(y),
    "a written view": lambda: torch.zeros(3, 2)[:, 1].copy_(X),
    "lists that are usual": lambda: torch.ops.aten.max_pool2d_with_indices(torch.rand(1, 4, 4), [2, 2]),
    "lists that are usual and said": lambda: torch.ops.aten.max_pool2d_with_indices(torch.rand(1, 4, 4), [2, 2], [], 0),
    "another list": lambda: torch.ops.aten.max_pool2d_with_indices(torch.rand(1, 4, 4), [2, 2], [1, 1]),
    "a flag behind lists": lambda: torch.ops.aten.max_pool2d_with_indices(torch.rand(1, 5, 5), [2], ceil_mode=True),
    "dimensions that may be none": lambda: X.mean(None),
    "dimensions and a flag": lambda: X.sum([0], keepdim=True),
    "a dtype": lambda: X.sum([0], dtype=torch.float64),
    "a text": lambda: torch.nn.functional.gelu(X, approximate="tanh"),
    "a text that is usual": lambda: torch.nn.functional.gelu(X),
    "a format": lambda: torch.ones(1, 2, 2, 2).clone(memory_format=torch.channels_last),
    "tensors that are left out, and three results": lambda: torch.ops.aten.native_layer_norm(X, [3], None, None, 1e-5),
    "tensors that may be left out": lambda: torch.nn.functional.layer_norm(X, [3], Y, X),
    "results that are not asked for": lambda: torch.ops.aten.native_layer_norm_backward(
        *(X, X, [3], torch.zeros(1), torch.ones(1), Y, None, [True, False, False])
    ),
    "a part of a leaf": lambda: X[1:] * 2,
    "a leaf of another kind": lambda: X.to_sparse() * 2,
    "a conjugated view": lambda: torch.ones(2, dtype=torch.complex64).conj() * 2,
    "another device": lambda: torch.ones(2, device="meta") * 2,
    "a tensor without elements": lambda: torch.ones(0).add_(1),
    "random numbers": lambda: torch.zeros(3).bernoulli_(),
    "random numbers, and what is drawn next": lambda: (
        torch.zeros(3).bernoulli_(0.25),
        torch.zeros(3).bernoulli_(0.25),
    ),
    "random numbers of another generator": lambda: torch.zeros(3).bernoulli_(
        generator=torch.Generator().manual_seed(1)
    ),
    "memory that nobody has written": lambda: torch.empty_like(X).fill_(1),
    "such memory of another kind": lambda: torch.empty_like(X, dtype=torch.int32, device="cpu").fill_(1),
    "such memory in another format": lambda: torch.empty_like(X[None, None, None], memory_format=torch.channels_last),
    "such memory on another device": lambda: torch.empty_like(X, device="meta"),
    "a part of a leaf, and then a generator": lambda: PART.bernoulli_(1.0, generator=torch.Generator().manual_seed(1)),
    "a part of a leaf, and then a device": lambda: torch.empty_like(PART, device="cpu").fill_(1),
    "another device, and then this one": lambda: torch.empty_like(torch.ones(2, device="meta"), device="cpu").fill_(1),
    "a step of Adam": lambda: torch.zeros(3).lerp_(X, 0.5).addcmul_(X, Y, value=0.5).sqrt().addcdiv_(X, Y),
}


@pytest.mark.parametrize("call", UNBOXED.values(), ids=UNBOXED)
def test_unboxed_calls_match_the_python_tracer(call: Any) -> None:
    def traced(tracer: str) -> list[Any]:
        torch.manual_seed(0)
        with HashDebugTrace(tracer=tracer) as trace:
            call()
        return [replace(record, module="") for record in trace.finish().records]

    traced("native")  # of an op that the recorder does not know yet the call is boxed
    native, python = traced("native"), traced("python")
    assert native
    assert [(one.op, one.arguments, one.inputs, one.outputs, one.rng) for one in native] == [
        (one.op, one.arguments, one.inputs, one.outputs, one.rng) for one in python
    ]


def test_these_ops_have_unboxed_kernels() -> None:
    names = ["view", "t", "transpose.int", "slice.Tensor", "add.Tensor", "add_.Tensor", "sum.dim_IntList", "clone"]
    names += ["bernoulli_.float", "empty_like", "lerp_.Scalar", "addcmul_", "addcdiv_", "sqrt"]
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", NATIVE_KEY) for name in names)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::sort", NATIVE_KEY)


def test_an_op_that_raises_leaves_no_record_and_its_name() -> None:
    other = torch.ones(2)
    with HashDebugTrace(tracer="native") as trace:
        X.sin()
        with pytest.raises(RuntimeError, match="size of tensor"):
            X.add_(other)
        X.cos()
    assert [record.op for record in trace.finish().records] == ["aten.sin.default", "aten.cos.default"]
    assert trace.failed_op == "aten.add_.Tensor"


def test_tensor_owned_by_python_in_many_threads() -> None:
    """Torch takes the GIL where a second owner of such a tensor comes or goes, which another thread may hold that waits
    for the recorder."""

    def work() -> None:
        for _ in range(200):
            x = torch.ones(2)
            x = x * x
            x.add_(x)

    with HashDebugTrace(tracer="native") as trace:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(trace.finish().records) == 4 * 200 * 3


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 makes fake tensors below the recorder")
def test_fake_factories_make_no_records() -> None:
    with HashDebugTrace(tracer="native") as trace, FakeTensorMode():
        torch.ones(2)
    assert not trace.finish().records


def _normalized(training: bool, momentum: float) -> list[tuple[str, int, str]]:
    """What a batch norm wrote, and who wrote the statistics that are read after it."""
    mean, variance = torch.zeros(3), torch.ones(3)
    with HashDebugTrace(tracer="native") as trace:
        torch.ops.aten.native_batch_norm(torch.rand(2, 3), None, None, mean, variance, training, momentum, 1e-5)
        mean.sin()
    *_, normalized, read = trace.finish().records
    return [(normalized.op, len(normalized.outputs), read.inputs[0].source.partition("/")[0])]


def test_running_statistics_are_written_in_training_alone() -> None:
    assert _normalized(True, 0.5) == [("aten.native_batch_norm.default", 5, "forward")]
    assert _normalized(False, 0.5) == [("aten.native_batch_norm.default", 3, "other")]


def test_given_generators_state_is_recorded() -> None:
    def state(seed: int) -> str:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(seed)
        with HashDebugTrace(tracer="native") as trace:
            torch.rand(3, generator=generator)
        return trace.finish().records[0].rng

    assert state(1) == state(1) != state(2)
