"""Unchanged kernels are reported unchanged, and every planted change alone is named."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.fingerprint import values
from hashbench.extensions.fingerprint.checking import check
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.measure import VARIES, record
from hashbench.extensions.fingerprint.verify import CHANGED, NOT_RUN, SAME, summary
from tests.extensions.fingerprint.fingerprint_helpers import PLANTED, planted, verified


def test_unchanged_kernels_are_the_same(base: Fingerprints) -> None:
    verification = verified(base)

    assert verification.changed == ()
    assert verification.not_run == {}
    assert verification.same == verification.kernels > 20
    phases = {kernel.phase for kernel in base.models[0].kernels}
    assert phases >= {"forward", "backward"}
    assert {"a view", "allocates memory"} <= verification.left_out.keys()


@pytest.mark.parametrize("op", PLANTED)
def test_planted_change_is_named_alone(base: Fingerprints, op: str) -> None:
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
def test_twenty_planted_changes_are_named(base: Fingerprints) -> None:
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


def test_comparison_uses_no_torch_kernel() -> None:
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


def test_equal_kernels_of_models_run_once(base: Fingerprints) -> None:
    begun: list[int] = []
    two = replace(base, models=(base.models[0], replace(base.models[0], name="other")))
    with planted("silu", PLANTED["silu"]):
        verification = summary(two, list(check(two, begin=begun.append)))

    assert begun == list(range(base.kernels))
    (change,) = verification.changed
    assert change.models == ("net", "other")
    assert verification.kernels == base.kernels


def test_varying_kernel_is_not_changed() -> None:
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


@pytest.fixture
def spoiling() -> Iterator[Callable[[], None]]:
    """A program of two kernels that read the same; the first one also writes there, not declared in its schema."""
    library = torch.library.Library("fingerprint_spoils", "DEF")
    library.define("first(Tensor x) -> Tensor")
    library.define("second(Tensor x) -> Tensor")

    def first(x: torch.Tensor) -> torch.Tensor:
        total = x[:100].sum()
        x.numpy()[:100] += 1.0
        return total

    library.impl("first", first, "CPU")
    library.impl("second", lambda x: x[:50].sum(), "CPU")
    x = torch.ones(2**18)

    def program() -> None:
        torch.ops.fingerprint_spoils.first(x)
        torch.ops.fingerprint_spoils.second(x)

    yield program
    library._destroy()


def test_undeclared_writes_reach_no_other_kernel(spoiling: Callable[[], None]) -> None:
    made = record(spoiling, name="both")
    first, second = (kernel for kernel in made.models[0].kernels if kernel.op.startswith("fingerprint_spoils."))
    (alone,) = record(lambda: torch.ops.fingerprint_spoils.second(torch.ones(2**18)), name="one").models
    assert (first.op, second.op) == ("fingerprint_spoils.first.default", "fingerprint_spoils.second.default")
    assert second.outputs == alone.kernels[-1].outputs
    assert {checked.status for checked in check(made)} == {SAME}


def test_written_arguments_reach_no_other_run() -> None:
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
def test_hostile_kernel_is_not_run(name: str) -> None:
    made = record(lambda: torch.ones(3).relu_(), name="relu")
    model = made.models[0]
    (kernel,) = [kernel for kernel in model.kernels if kernel.op == "aten.relu_.default"]
    hostile = replace(made, models=(replace(model, kernels=(replace(kernel, **HOSTILE[name]),)),))

    (checked,) = check(hostile)

    assert checked.status == NOT_RUN
    assert checked.note
