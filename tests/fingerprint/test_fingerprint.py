"""Kernel fingerprints: the same numbers everywhere, nothing changed where nothing changed, and every planted change
named, alone."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import functools
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from runner_helpers import FunctionRunner

from hashbench.check import fingerprint
from hashbench.errors import HashbenchError
from hashbench.fingerprint import document, measure, periods, text, values
from hashbench.fingerprint.calls import KernelCollector
from hashbench.fingerprint.checking import check
from hashbench.fingerprint.document import Fingerprints, TensorWord, tensor_word
from hashbench.fingerprint.measure import RANDOM, VARIES, record
from hashbench.fingerprint.periods import Periods, can_repeat
from hashbench.fingerprint.verify import CHANGED, NOT_RUN, SAME, Checked, Verification, summary
from hashbench.io import document_digest
from hashbench.records import ModelSpec, RunOptions
from hashbench.run.workload import Workload
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.op_schema import plan_of


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 16)
        self.conv, self.norm = torch.nn.Conv1d(16, 4, 3), torch.nn.BatchNorm1d(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.first(self.embedding(tokens)))
        return self.norm(self.conv(hidden.transpose(1, 2))).softmax(-1)


def step() -> None:
    """Forward, backward and an optimizer's step."""
    torch.manual_seed(1)
    net, tokens = Net(), torch.arange(24).reshape(2, 12) % 7
    net(tokens).square().sum().backward()
    torch.optim.Adam(net.parameters(), lr=0.01, foreach=True).step()


@pytest.fixture(scope="module")
def base() -> Fingerprints:
    return record(step, name="net")


def verified(fingerprints: Fingerprints) -> Verification:
    return summary(fingerprints, list(check(fingerprints)))


@contextmanager
def planted(op: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Another implementation of an op of torch's on the CPU, in this process."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(op, kernel, "CPU")
        yield
    finally:
        library._destroy()


# ------------------------------------------------------------------------------------------------ synthetic numbers

KNOWN_VALUES = [
    ("float64", "", "a012022ac46c1ce8"),
    ("float32", "", "00652771851928a3"),
    ("float32", ">=0", "d2fb3f8d87ae8734"),
    ("float32", "0..1", "6f77bfd3082e79b5"),
    ("bfloat16", "", "6d98043d0f2533cb"),
    ("float16", "0..1", "dd84c7f1f2425b02"),
    ("float8_e4m3fn", "", "8ae2db884a6a8753"),
    ("float8_e5m2", ">=0", "ffe4f7b4f44c0d04"),
]


@pytest.mark.parametrize(("dtype", "limits", "digest"), KNOWN_VALUES)
def test_synthetic_numbers_are_the_same_on_every_machine(dtype: str, limits: str, digest: str) -> None:
    kind = getattr(torch, dtype)
    made = values.filled(kind, 1000, values=limits, number=1)
    numbers = made.view(kind).double()

    assert xxhash.xxh3_64_hexdigest(made.numpy().tobytes()) == digest
    assert bool(numbers.isfinite().all())
    assert float(numbers.abs().max()) < (1 if limits == values.UNIT else 4)
    assert (float(numbers.min()) >= 0) == (limits != values.ANY)
    assert len(set(numbers.tolist())) > 10


def test_whole_numbers_stay_in_their_range() -> None:
    made = values.filled(torch.int64, 8, values="-3..5", number=0).view(torch.int64)

    assert made.tolist() == [4, -3, -2, 4, 1, 0, 2, 5]
    with pytest.raises(values.NoValuesError, match="is not a range"):
        values.filled(torch.int64, 8, values="9..5", number=0)
    with pytest.raises(values.NoValuesError, match="no synthetic values for quint8"):
        values.filled(torch.quint8, 8, values="", number=0)


@pytest.mark.parametrize("elements", [1, 100, 76736, 76737, values.PERIOD + 1])
def test_whole_numbers_are_those_of_their_places_however_few_there_are(elements: int) -> None:
    """Memory number 1 begins 76736 places before the end of the period, and goes on from its beginning."""
    places = (np.arange(elements) + values.PERIOD - 76736) % values.PERIOD
    made = values.filled(torch.int16, elements, values="-3..5", number=1).view(torch.int16)
    assert np.array_equal(made.numpy(), (values.scrambled(values.PERIOD)[places] % 9).astype(np.int16) - 3)


def test_few_whole_numbers_take_little_memory() -> None:
    values.filled(torch.int64, 100, values="0..9", number=0)  # the words are made once
    tracemalloc.start()
    try:
        values.filled(torch.int64, 100, values="0..9", number=0)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(7), torch.tensor([True, False]), torch.zeros(0, dtype=torch.int32), torch.arange(200_000) % 2],
)
def test_recorded_content_comes_back(tensor: torch.Tensor) -> None:
    content, limits = values.content_of(tensor)

    assert limits == ""
    assert torch.equal(values.content_from(content, tensor.dtype, tuple(tensor.shape)), tensor)


def test_of_large_content_the_range_is_kept() -> None:
    large = values.filled(torch.int64, 100_000, values="4..77", number=0).view(torch.int64)

    assert values.content_of(large) == ("", "4..77")


def test_content_that_shows_early_that_it_is_large_is_not_compressed_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []

    class Counting:
        def __init__(self, level: int) -> None:
            self._encoder = compressobj(level)

        def compress(self, content: bytes) -> bytes:
            given.append(len(content))
            return self._encoder.compress(content)

        def flush(self) -> bytes:
            return self._encoder.flush()

    compressobj = zlib.compressobj
    monkeypatch.setattr(zlib, "compressobj", Counting)
    large = values.filled(torch.int64, 1_000_000, values="4..77", number=0).view(torch.int64)
    assert values.content_of(large) == ("", "4..77")
    assert 0 < sum(given) < 100_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("numbers", "limits"),
    [
        ([0.0, 0.5, 1.0], values.UNIT),
        ([0.0, -0.0, 1.0], values.UNIT),
        ([-0.0], values.UNIT),
        ([0.0, 1.5], values.POSITIVE),
        ([1.0, float("inf")], values.POSITIVE),
        ([1.0, -0.5], values.ANY),
        ([0.5, float("nan")], values.ANY),
        ([], values.ANY),
        ([*[0.5] * 5000, -1.0], values.ANY),
    ],
)
def test_the_range_of_recorded_numbers(dtype: torch.dtype, numbers: list[float], limits: str) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)

    assert values.range_of(tensor) == limits
    assert values.range_of(torch.stack([tensor, tensor], 1)[:, 0]) == limits


def test_what_has_no_synthetic_numbers_says_so() -> None:
    with pytest.raises(values.NoValuesError, match="no synthetic values for uint16"):
        values.content_of(torch.zeros(3, dtype=torch.uint16))


@pytest.mark.parametrize("content", ["", "9:abcd", "1:abcd", "1:eNpjZAIAAAYAAw==", "4:!!"])
def test_damaged_content_is_refused(content: str) -> None:
    with pytest.raises(values.NoValuesError):
        values.content_from(content, torch.int64, (7,))


# --------------------------------------------------------------------------------------------- record and verify


def test_nothing_changes_where_nothing_changed(base: Fingerprints) -> None:
    verification = verified(base)

    assert verification.changed == ()
    assert verification.not_run == {}
    assert verification.same == verification.kernels > 20
    phases = {kernel.phase for kernel in base.models[0].kernels}
    assert phases >= {"forward", "backward"}
    assert {"a view", "allocates memory"} <= verification.left_out.keys()


PLANTED: dict[str, Callable[..., Any]] = {
    "silu": lambda x: torch.ops.aten.mul(torch.sigmoid(x), x) * 2,
    "_softmax": lambda x, _dim, _half: torch.zeros_like(x),
    "silu_backward": lambda grad, _x: grad * 2,
    "pow.Tensor_Scalar": lambda x, _exponent: x * 3,
}


@pytest.mark.parametrize("op", PLANTED)
def test_a_planted_change_is_the_only_one_named(base: Fingerprints, op: str) -> None:
    with planted(op, PLANTED[op]):
        verification = verified(base)

    name = op if "." in op else f"{op}.default"
    assert {change.kernel.op for change in verification.changed} == {f"aten.{name}"}
    assert verification.not_run == {}
    distance = verification.changed[0].checked.distance
    assert distance.differing > 0
    assert distance.max_relative is not None
    assert verified(base).changed == ()


@pytest.mark.slow
def test_twenty_planted_changes_name_what_runs_them_and_nothing_else(base: Fingerprints) -> None:
    """Each is torch's own kernel, but for the last bit of the first number that it writes. Besides its own op, those
    whose implementation calls it in turn run it, and may be named."""
    kernels = base.models[0].kernels
    ops = sorted({kernel.op for kernel in kernels})
    alone = 0
    for op in random.Random(0).sample(ops, 20):
        begun: list[int] = []
        ran: set[int] = set()
        with planted_bit(op, lambda begun=begun, ran=ran: ran.add(begun[-1])):
            results = list(check(base, begin=begun.append))
        changed = {checked.number for checked in results if checked.status == CHANGED}
        own = {number for number, kernel in enumerate(kernels) if kernel.op == op}

        assert own <= changed <= ran, op
        for checked in results:  # a kernel of Python's takes no number for a tensor, which others may give it
            assert checked.status != NOT_RUN or f"{op.split('.')[1]}() Expected a value" in checked.note, op
        alone += changed == own
    assert alone >= 15


@contextmanager
def planted_bit(op: str, called: Callable[[], object]) -> Iterator[None]:
    """A kernel that writes the first number of an op's result with another last bit, and tells that it was called."""
    _, name, overload = op.split(".")
    func = getattr(getattr(torch.ops.aten, name), overload)
    schema = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    original, plan = torch.library.get_kernel(schema, "CPU"), plan_of(func)

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        output = original.call_boxed(keys, *args, **kwargs)
        called()
        for tensor in plan.written_by(args, kwargs, output)[:1]:
            bits = values.bits_of(tensor)
            bits[(0,) * bits.ndim] ^= 1
        return output

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(schema.removeprefix("aten::"), kernel, "CPU", with_keyset=True)
        yield
    finally:
        library._destroy()


JUDGES: dict[str, Callable[..., Any]] = {
    "copy_": lambda x, _source, _wait=False: x,
    "clone": lambda x, **_: torch.ones_like(x),
    "index.Tensor": lambda x, _indices: x[:0],
    "aminmax": lambda *_, **__: (torch.zeros(()), torch.zeros(())),
    "ne.Tensor": lambda x, _other: torch.zeros(x.shape, dtype=torch.bool),
    "sub.Tensor": lambda x, _other, **_: x,
    "abs": lambda x: x,
    "max": lambda x: x[0],
}


def test_no_kernel_of_torch_judges_the_others() -> None:
    """What copies, samples, packs and compares in other people's code is broken here, and one kernel differs."""

    def run() -> None:
        x = torch.arange(24.0).reshape(4, 6)
        x[:, ::2].mul_(x[:, 1::2])
        torch.nn.functional.silu(x)
        torch.arange(6).add_(torch.ones(6, dtype=torch.int64))

    made = record(run, name="judged")
    with contextlib.ExitStack() as stack:
        for op, kernel in {**JUDGES, "silu": lambda x: torch.ones_like(x)}.items():
            stack.enter_context(planted(op, kernel))
        verification = verified(made)

    (change,) = verification.changed
    assert change.kernel.op == "aten.silu.default"
    distance = change.checked.distance
    assert distance.differing == distance.samples == 8
    assert distance.max_relative is not None
    assert distance.max_relative > 0.5
    assert verification.not_run == {}


def test_equal_kernels_of_several_models_run_once(base: Fingerprints) -> None:
    begun: list[int] = []
    two = replace(base, models=(base.models[0], replace(base.models[0], name="other")))
    with planted("silu", PLANTED["silu"]):
        verification = summary(two, list(check(two, begin=begun.append)))

    assert begun == list(range(base.kernels))
    (change,) = verification.changed
    assert change.models == ("net", "other")
    assert verification.kernels == base.kernels


def test_kernels_that_run_otherwise_are_not_equal(base: Fingerprints) -> None:
    begun: list[int] = []
    (model,) = base.models
    others = replace(model, name="other", deterministic="off"), replace(model, name="third", contents=("1:",) * 9)
    list(check(replace(base, models=(model, *others)), begin=begun.append))

    with_contents = sum("#" in " ".join(kernel.tensors) for kernel in model.kernels)
    assert len(begun) == 2 * base.kernels + with_contents


def test_indices_and_masks_are_those_of_the_recording() -> None:
    index = torch.tensor([3, 1, 3, 0])
    made = record(lambda: torch.zeros(5, 2).index_select(0, index), name="picked")
    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "aten.index_select.default"]

    word = tensor_word(kernel.tensors[1])
    content = made.models[0].contents[int(word.values[1:])]
    assert values.content_from(content, torch.int64, (4,)).tolist() == [3, 1, 3, 0]


def test_arguments_that_share_memory_share_it_again() -> None:
    def shared() -> None:
        memory = torch.ones(10)
        memory[1:5].add_(memory[5:9])

    made = record(shared, name="shared")

    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "aten.add_.Tensor"]
    assert [tensor_word(word).memory for word in kernel.tensors] == [None, 0]
    assert verified(made).changed == ()


def test_calls_are_of_one_signature_where_every_argument_reads_the_same() -> None:
    x = torch.ones(3)
    collector = KernelCollector()
    with HashDebugTrace(watcher=collector):
        for minimum in (1, 1, 1.0, 1.0, True, 0.0, -0.0, math.nan, math.nan):
            torch.clamp(x, minimum)
        for place in (0, 0, 1):
            torch.softmax(x.expand(3, 3), dim=place)
    calls = [(kernel.op, kernel.args[1], kernel.calls) for kernel in collector.kernels]
    clamped = [(repr(minimum), count) for op, minimum, count in calls if op == "aten.clamp.default"]
    assert [count for _, count in clamped] == [2, 2, 1, 1, 1, 2]
    assert [(place, count) for op, place, count in calls if op == "aten._softmax.default"] == [(0, 2), (1, 1)]


def test_what_varies_draws_or_raises_is_left_out_with_its_reason() -> None:
    counted = iter(range(1000))
    library = torch.library.Library("fingerprint_test", "DEF")
    library.define("varies(Tensor x) -> Tensor")
    library.define("picky(Tensor x) -> Tensor")
    library.impl("varies", lambda x: x + next(counted), "CPU")
    library.impl("picky", lambda x: x + 1 if float(x[0]) == 7 else 1 // 0, "CPU")

    def run() -> None:
        torch.ops.fingerprint_test.varies(torch.ones(3))
        torch.ops.fingerprint_test.picky(torch.full((3,), 7.0))
        torch.rand(3).bernoulli_(0.5)

    made = record(run, name="all kinds")

    left_out = made.models[0].left_out
    assert left_out[VARIES] == {"fingerprint_test.varies.default": 1}
    assert "aten.bernoulli_.float" in left_out[RANDOM]
    (raised,) = [reason for reason in left_out if reason.startswith("raises on synthetic inputs")]
    assert left_out[raised] == {"fingerprint_test.picky.default": 1}
    library._destroy()


def test_what_gives_an_argument_another_size_has_a_fingerprint() -> None:
    def run() -> None:
        torch.mul(torch.ones(2, 3), 2, out=torch.empty(0))
        torch.max(torch.ones(2, 3), 1, out=(torch.empty(0), torch.empty(7, dtype=torch.long)[:0]))

    recorded = record(run, name="out")
    (model,) = recorded.models
    outputs = {kernel.op: tuple(word.partition(":")[0] for word in kernel.outputs) for kernel in model.kernels}

    assert not set(model.left_out) - {"a view", "allocates memory"}
    assert outputs["aten.mul.out"] == ("float32[2,3]",)
    assert outputs["aten.max.dim_max"] == ("float32[2]", "int64[2]")
    assert verified(recorded).same == len(model.kernels)


def test_what_writes_a_sparse_or_nested_tensor_is_left_out(tmp_path: Path) -> None:
    def run() -> None:
        dense = torch.eye(8)
        dense.to_sparse()
        dense.to_sparse_csr()
        torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))

    recorded = record(run, name="sparse")
    (model,) = recorded.models
    document.write(tmp_path / "sparse.json", recorded)

    assert model.left_out["writes a tensor of a special kind"] == {
        "aten._to_sparse.default": 1,
        "aten._to_sparse_csr.default": 1,
        "aten._nested_tensor_from_mask.default": 1,
    }
    assert document.read(tmp_path / "sparse.json") == recorded


def test_an_op_of_somebody_elses_runs_on_numbers_from_0_to_1() -> None:
    """It may take some as places, and write there unchecked."""
    library = torch.library.Library("fingerprint_places", "DEF")
    library.define("row(Tensor x, Tensor boxes, Tensor columns) -> Tensor")
    places: list[int] = []

    def row(x: torch.Tensor, boxes: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        places.extend(int(box[0]) for box in boxes)
        return x[[0] * len(boxes)][:, at]

    library.impl("row", row, "CPU")

    boxes = torch.tensor([[0.0, 9.0], [0.5, -7.0], [0.25, 3.0], [0.0, 0.0]])
    columns = torch.tensor([2, 0])
    made = record(lambda: torch.ops.fingerprint_places.row(torch.ones(2, 3), boxes, columns), name="places")
    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "fingerprint_places.row.default"]
    assert [tensor_word(word).values for word in kernel.tensors] == [values.UNIT, values.UNIT, "#0"]
    assert verified(made).changed == ()
    assert set(places) == {0}
    library._destroy()


def test_a_kernel_of_many_results_is_not_called_changed() -> None:
    state = {"value": 0, "steps": 0}
    library = torch.library.Library("fingerprint_twice", "DEF")
    library.define("kernel(Tensor x) -> Tensor")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        state["value"] += state["steps"]
        return x + state["value"] % 2

    library.impl("kernel", kernel, "CPU")
    made = record(lambda: torch.ops.fingerprint_twice.kernel(torch.ones(3)), name="twice")
    state.update(value=0, steps=1)
    (checked,) = [one for one in check(made) if one.status != SAME]
    library._destroy()

    assert checked.status == NOT_RUN
    assert checked.note == VARIES


@pytest.mark.parametrize(("large", "copied_in"), [(measure.LARGE, [0, 1]), (0, [])], ids=["small", "large"])
def test_each_repetition_has_the_same_numbers_at_another_address_and_needs_few_copies(
    large: int, copied_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one takes the call's own memory; what is large is made anew instead of copied."""
    monkeypatch.setattr(measure, "LARGE", large)
    seen: list[tuple[int, list[float]]] = []
    copies: list[int] = []
    library = torch.library.Library("fingerprint_places", "DEF")
    library.define("kernel(Tensor(a!) x) -> ()")

    def kernel(x: torch.Tensor) -> None:
        seen.append((x.data_ptr(), x.tolist()))
        x.numpy()[:] = 1.0

    library.impl("kernel", kernel, "CPU")
    copy = measure._copies

    def copied(contents: Any, repetition: int, resizable: bool, arena: Any) -> Any:
        copies.extend([repetition] * len(contents))
        return copy(contents, repetition, resizable, arena)

    monkeypatch.setattr(measure, "_copies", copied)
    (model,) = record(lambda: torch.ops.fingerprint_places.kernel(torch.ones(3)), name="places").models
    library._destroy()
    runs = [address for address, _ in seen[1:]]  # after that of the recording

    assert [kernel.op for kernel in model.kernels] == ["aten.ones.default", "fingerprint_places.kernel.default"]
    assert len({address % 4096 for address in runs}) == len(runs) == 3
    assert not any(address % 64 for address in runs)
    assert seen[1][1] == seen[2][1] == seen[3][1]
    assert copies == copied_in


def test_an_arena_is_used_again_and_its_rooms_lie_apart() -> None:
    arena = values.Arena()
    large = arena.rooms([100_000], repetition=0)[0].ctypes.data
    assert large % 4096 == 0  # so that places in two arenas can be told apart
    for repetition in range(-1, 64):
        rooms = arena.rooms([100, 64, 7], repetition=repetition)
        begins = [room.ctypes.data for room in rooms]
        assert [len(room) for room in rooms] == [100, 64, 7]
        assert not any(begin % 64 for begin in begins)
        assert all(
            after - begin >= len(room) + 64 for begin, after, room in zip(begins, begins[1:], rooms, strict=False)
        )
        assert begins[0] == large + repetition % 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_what_calls_share_is_what_would_be_written_for_each(dtype: torch.dtype) -> None:
    arena = values.Arena()
    for number, elements in ((0, 3), (7, 1000), (1, values.PERIOD), (2, 2 * values.PERIOD + 5), (3, 10)):
        room = arena.shared(elements * dtype.itemsize, dtype, values=values.ANY, number=number)
        alone = values.filled(dtype, elements, values=values.ANY, number=number)
        assert room.tobytes() == alone.numpy().tobytes()
        assert room.ctypes.data % 64 == 0
    assert arena.is_intact()
    room[-1] ^= 1
    assert not arena.is_intact()
    arena.forget()
    assert arena.is_intact()
    assert arena.shared(len(room), dtype, values=values.ANY, number=3).tobytes() == alone.numpy().tobytes()


def test_what_was_spoilt_before_more_was_needed_is_not_forgotten() -> None:
    arena = values.Arena()
    arena.shared(4000, torch.float32, values=values.ANY, number=0)[0] ^= 1
    arena.shared(2**30, torch.float32, values=values.ANY, number=0)
    assert not arena.is_intact()


def test_however_much_is_shared_takes_the_memory_of_one_period() -> None:
    period = np.arange(values.PERIOD, dtype=np.uint32)
    repeated = Periods(period)
    small = repeated.room(4096, begin=16)
    large = repeated.room(2**30, begin=0).view(np.uint32)
    assert np.array_equal(large, np.resize(period, len(large)))
    large[-1] = 0  # in the last period, and so in all
    assert np.flatnonzero(large == 0).tolist()[1] == (len(large) - 1) % values.PERIOD
    assert not repeated.is_intact()
    del repeated
    assert small.view(np.uint32)[0] == 16  # who has memory keeps it


def test_shared_numbers_leave_no_descriptor_and_no_memory_behind() -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count(
            "hashbench numbers"
        )

    before = held()
    arena = values.Arena()
    arena.shared(2**28, torch.float32, values=values.ANY, number=0)
    assert held()[0] == before[0] + 1
    assert held()[1] > before[1]
    del arena
    assert held() == before


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("memfd", [None, refused])
def test_where_memory_cannot_repeat_every_call_has_its_own_and_gives_the_same(
    memfd: Callable[..., int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.ones(2 * values.SHARED // 4)
    with_shared = record(lambda: large.sum(), name="sum")
    if memfd:
        monkeypatch.setattr(os, "memfd_create", memfd)
    else:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(values, "Periods", None)
    assert not values.Arena(shares=True).shares
    assert record(lambda: large.sum(), name="sum").models == with_shared.models


def test_few_calls_of_the_system_tell_whether_memory_can_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    original = periods._map_over
    monkeypatch.setattr(periods, "_map_over", lambda *of: mapped.append(of) or original(*of))
    values.Arena(shares=True)
    assert 0 < len(mapped) < 10


def test_numbers_fill_whole_pages_of_any_size() -> None:
    assert all(can_repeat(page, numbers=values.PERIOD) for page in (4096, 16384, 65536))
    assert not can_repeat(3 * 4096, numbers=values.PERIOD)


@pytest.mark.parametrize("made", [values.Arena().shared, lambda *of, **more: values.filled(*of[::-1], **more)])
def test_there_are_no_numbers_for_a_dtype_of_no_significand(made: Callable[..., object]) -> None:
    with pytest.raises(values.NoValuesError, match="no synthetic values for float8_e8m0fnu"):
        made(values.SHARED, torch.float8_e8m0fnu, values=values.ANY, number=0)


@pytest.fixture
def spoiling() -> Iterator[Callable[[], None]]:
    """A program of two kernels that read much; the first one also writes there, which its schema does not say."""
    library = torch.library.Library("fingerprint_spoils", "DEF")
    library.define("first(Tensor x) -> Tensor")
    library.define("second(Tensor x) -> Tensor")

    def first(x: torch.Tensor) -> torch.Tensor:
        total = x[:100].sum()
        x.numpy()[:100] += 1.0
        return total

    library.impl("first", first, "CPU")
    library.impl("second", lambda x: x[:50].sum(), "CPU")
    x = torch.ones(values.SHARED // 4)

    def program() -> None:
        torch.ops.fingerprint_spoils.first(x)
        torch.ops.fingerprint_spoils.second(x)

    yield program
    library._destroy()


def test_what_a_kernel_writes_without_saying_so_is_in_no_other(spoiling: Callable[[], None]) -> None:
    made = record(spoiling, name="both")
    first, second = (kernel for kernel in made.models[0].kernels if kernel.op.startswith("fingerprint_spoils."))
    (alone,) = record(lambda: torch.ops.fingerprint_spoils.second(torch.ones(values.SHARED // 4)), name="one").models
    assert (first.op, second.op) == ("fingerprint_spoils.first.default", "fingerprint_spoils.second.default")
    assert second.outputs == alone.kernels[-1].outputs
    assert {checked.status for checked in check(made)} == {SAME}


def test_the_memory_of_the_largest_call_is_used_again() -> None:
    arena = values.Arena()
    arena.rooms([2**31], repetition=0)[0][0] = 7
    arena.rooms([2**20], repetition=0)
    assert arena.rooms([2**31], repetition=0)[0][0] == 7


FAULTS = """
import resource, sys, torch
from hashbench.check.fingerprint import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = len(sys.argv) > 1 and keep_freed_memory()
print(int(kept), min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_what_kernels_free_stays_with_the_process_of_a_model() -> None:
    def faults(*arguments: str) -> tuple[int, int]:
        told = subprocess.run([sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True)
        kept, number = told.stdout.split()
        return int(kept), int(number)

    assert faults("kept") < (1, 100)
    assert faults() > (0, 1000)  # 64 MiB come from the system each time, page by page


ASKED = """
import pathlib, sys
import psutil
from hashbench.check import fingerprint

fingerprint.OVERCOMMIT = pathlib.Path(sys.argv[1])
before = psutil.Process().memory_info()
assert fingerprint.keep_freed_memory()
after = psutil.Process().memory_info()
print(after.vms - before.vms, after.rss - before.rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
@pytest.mark.parametrize(("mode", "asks"), [("0", True), ("2", False)])
def test_memory_is_asked_for_ahead_where_that_takes_none_from_others(mode: str, asks: bool, tmp_path: Path) -> None:
    (tmp_path / "overcommit_memory").write_text(f"{mode}\n")
    command = [sys.executable, "-c", ASKED, str(tmp_path / "overcommit_memory")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    asked, touched = map(int, told.stdout.split())
    assert (asked >= 2**28) == asks
    assert touched < 2**26


def test_what_a_kernel_writes_to_its_arguments_is_in_no_other_run() -> None:
    """All have their memory in one place."""

    def run(*sizes: int) -> None:
        for size in sizes:
            torch.ones(size).mul_(2).add_(torch.ones(size))

    sizes = (3, 5, 3000, 4)
    together = record(functools.partial(run, *sizes), name="together")
    alone = [record(functools.partial(run, size), name="alone").models[0].kernels for size in reversed(sizes)]
    assert {kernel.signature(): kernel.outputs for kernel in together.models[0].kernels} == {
        kernel.signature(): kernel.outputs for kernels in alone for kernel in kernels
    }
    assert not [one for one in check(together) if one.status != SAME]


def test_the_memory_of_a_model_is_given_back_once_before_its_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of one that refers to itself. It is not copied: nobody runs it again."""
    ran: list[weakref.ref[torch.nn.Module]] = []
    collections: list[None] = []

    class Cyclic(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__["me"] = self
            ran.append(weakref.ref(self))
            return super().forward(x)

    def build() -> Workload:
        model = Cyclic(3, 3)
        model(torch.ones(1, 3))
        return Workload(model, (torch.ones(2, 3),))

    def collect() -> int:
        collections.append(None)
        return really()

    really = gc.collect
    monkeypatch.setattr(gc, "collect", collect)
    runner = FunctionRunner(RunOptions(mode="inference"))
    runner.build = build
    collected = fingerprint._collected(runner, ModelSpec("zoo", "net"), "on")
    assert [kernel.op for kernel in collected.kernels.kernels] == ["aten.addmm.default"]
    assert len(ran) > 1
    assert [one() for one in ran] == [None] * len(ran)
    assert len(collections) == 1


@pytest.mark.parametrize(("iterations", "forwards"), [(None, 1), (3, 3)])
def test_a_model_makes_one_step_and_its_optimizer_two(iterations: int | None, forwards: int) -> None:
    """The second one of an optimizer with momentum has other kernels than the first."""
    ran: list[None] = []

    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(None)
            return super().forward(x)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)

    runner = FunctionRunner(RunOptions(mode="training", iterations=iterations))
    runner.build = lambda: Workload(Counted(3, 3), (torch.ones(2, 3),), make_optimizer=momentum)
    collected = fingerprint._collected(runner, ModelSpec("zoo", "net"), "on")
    assert len(ran) == forwards
    ops = {kernel.op for kernel in collected.kernels.kernels if kernel.place.startswith("optimizer")}
    assert {"aten.clone.default", "aten.mul_.Tensor"} <= ops


def test_a_kernel_that_begins_after_the_cpu_time_of_a_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(measure.time, "thread_time", lambda: float(next(clock)))
    collector = KernelCollector()
    with HashDebugTrace(watcher=collector):
        torch.ones(3).sin().cos().tan()
    with measure.isolation(deterministic="on", threads=None):
        measured = measure.measure(collector, device=torch.device("cpu"), seconds=4)

    assert [kernel.op for kernel in measured.kernels] == ["aten.ones.default"]
    assert set(measured.left_out["no time left after 4 CPU s"]) == {
        f"aten.{op}.default" for op in ("sin", "cos", "tan")
    }


# ---------------------------------------------------------------------------------------------------------- the file


def test_the_file_comes_back(base: Fingerprints, tmp_path: Path) -> None:
    document.write(tmp_path / "base.json", base)

    assert document.read(tmp_path / "base.json") == base
    assert (tmp_path / "base.json").stat().st_size < 150 * base.kernels + 2000  # environment and tables


def test_a_file_whose_kernels_are_not_compressed_is_read(base: Fingerprints, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    assert document.read(changed_file(path, lambda _: None)) == base
    assert not isinstance(json.loads(path.read_text())["models"][0]["kernels"], str)


@pytest.mark.parametrize(
    "word",
    [
        TensorWord("float32", (8, 64), (64, 1)),
        TensorWord("int64", (), (), values="#3"),
        TensorWord("bool", (2, 3), (1, 2), offset=5, memory=1, values="0..1", digest="ab"),
        TensorWord("float32", (0,), (1,), values=">=0"),
    ],
)
def test_a_tensor_is_one_word(word: TensorWord) -> None:
    assert tensor_word(word.text()) == word


def changed_file(path: Path, change: Callable[[dict[str, Any]], object], *, forged: bool = True) -> Path:
    """The file with kernels that are not compressed, and with a change."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["models"] = [{**model, **document._table_of(model)} for model in content["models"]]
    change(content)
    if forged:
        content["sha256"] = document_digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another schema": (lambda it: it.update(schema=9), "it is of schema 9"),
    "other digests": (lambda it: it.update(schema=3), "it is of schema 3"),
    "no models": (lambda it: it.pop("models"), "it holds no fingerprints"),
    "a model twice": (lambda it: it["models"].append(it["models"][0]), "it has a model twice"),
    "other columns": (lambda it: it["models"][0].update(columns=["op"]), "have other columns"),
    "a field too many": (lambda it: it["models"][0].update(more=1), "has unknown fields: more"),
    "a row too short": (lambda it: it["models"][0]["kernels"][0].pop(), "another number of columns"),
    "a level that is none": (lambda it: it["models"][0].update(deterministic="x"), "settings that do not exist"),
    "a word that is none": (lambda it: it["models"][0]["words"].__setitem__(0, "float32[9"), "describes no tensor"),
    "a huge tensor": (lambda it: it["models"][0]["words"].__setitem__(0, f"float32[{10**9},{10**9}]"), "fits into"),
    "an argument of many": (
        lambda it: it["models"][0]["arguments"][0][0].append([{"each": 1, "times": 20_000}] * 6),
        "has more than 100000 arguments",
    ),
    "arguments that are missing": (lambda it: it["models"][0]["kernels"][0].__setitem__(1, 10**6), "is missing"),
    "three arguments": (lambda it: it["models"][0]["arguments"][0].extend([{}] * 2), "not a list and a mapping"),
    "no arguments": (lambda it: it["models"][0]["arguments"].__setitem__(0, []), "args"),
    "few bytes for many arguments": (
        lambda it: it["models"][0].update(
            kernels=it["models"][0]["kernels"][:1] * 200, arguments=[[[{"each": 1, "times": 20_000}] * 4]]
        ),
        "has more than 10000000 arguments",
    ),
    "a word that is missing": (lambda it: it["models"][0]["kernels"][0][2].append(10**6), "is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_file_is_refused_whole(base: Fingerprints, tmp_path: Path, name: str) -> None:
    change, said = REFUSED[name]
    path = tmp_path / "base.json"
    document.write(path, base)

    with pytest.raises(HashbenchError, match=said):
        document.read(changed_file(path, change))


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        pytest.param('no base85: "', "are damaged", id="not a text of bytes"),
        pytest.param(base64.b85encode(b"{}").decode(), "are damaged", id="not compressed"),
        pytest.param(document._compressed({"kernels": [[1], [1, 2]]})[:-5], "are damaged", id="truncated"),
        pytest.param(document._compressed([1]), "are damaged", id="no table"),
        pytest.param(document._compressed({"kernels": [[1], [1, 2]]}), "another number of columns", id="uneven"),
        pytest.param(document._compressed({"kernels": [" " * 2**24]}), "take more than 16 MiB", id="a bomb"),
    ],
)
def test_damaged_kernels_are_refused_whole(base: Fingerprints, tmp_path: Path, kernels: str, said: str) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["models"][0]["kernels"] = kernels
    content["sha256"] = document_digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(HashbenchError, match=said):
        document.read(path)


def test_kernels_that_take_more_are_not_decompressed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 2**20)
    bomb = {"kernels": base64.b85encode(zlib.compress(bytes(2**23), 9)).decode()}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="take more than 1 MiB"):
            document._table_of(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_truncated_or_changed_file_is_refused(base: Fingerprints, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(HashbenchError, match="it is not JSON"):
        document.read(path)
    path.write_text(whole.replace('"threads":', '"threads":1'), encoding="utf-8")
    with pytest.raises(HashbenchError, match="its checksum is another"):
        document.read(path)


HOSTILE: dict[str, dict[str, Any]] = {
    "an op that reads files": {"op": "aten.from_file.default", "args": ("/etc/passwd",), "tensors": ()},
    "an op that is none": {"op": "os.system.default", "args": ("true",), "tensors": ()},
    "a collective": {"op": "c10d.barrier.default"},
    "an allocation": {"op": "aten.empty.memory_format", "args": ([2**40],), "tensors": ()},
    "inputs of a terabyte": {"tensors": (f"float32[{2**38}]",)},
    "a small tensor that reaches far": {"tensors": (f"float32[2]/{2**40}",)},
    "a tensor that is missing": {"args": ({"tensor": 7},)},
    "content that is missing": {"tensors": ("int64[3] #99",)},
    "a range that is none": {"tensors": ("float32[3] 7..9",)},
    "other arguments": {"args": ()},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_kernel_is_not_run(name: str) -> None:
    made = record(lambda: torch.ones(3).relu_(), name="relu")
    model = made.models[0]
    (kernel,) = [kernel for kernel in model.kernels if kernel.op == "aten.relu_.default"]
    hostile = replace(made, models=(replace(model, kernels=(replace(kernel, **HOSTILE[name]),)),))

    (checked,) = check(hostile)

    assert checked.status == NOT_RUN
    assert checked.note


# --------------------------------------------------------------------------------------------------------- in words


def test_changes_are_shown_by_library(base: Fingerprints) -> None:
    with planted("silu", PLANTED["silu"]):
        verification = verified(base)

    environments = [{"packages": {"torch": version}, "threads": {"intra_op": 2}} for version in ("2.15.0", "2.15.1")]
    lines = text.verified_text(verification, recorded=environments[0], here=environments[1]).splitlines()

    assert lines[0] == f"1 of {verification.kernels} kernels changed (torch 2.15.0 -> 2.15.1)"
    assert lines[3].startswith("  aten.silu.default(float32[2,12,16])  forward; in net; ")
    assert lines[-1] == "Differences are the largest of the few elements of each output that are kept."


def test_equal_kernels_of_several_models_are_one(base: Fingerprints) -> None:
    two = replace(base, models=(base.models[0], replace(base.models[0], name="other")))
    results = [Checked(number, CHANGED) for number in range(two.kernels)]

    verification = summary(two, results)

    assert len(verification.changed) == base.kernels == verification.kernels
    assert verification.changed[0].models == ("net", "other")
