"""Every op twice, compared bit by bit: what is found, and what the program notices of it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hashbench import HashDebugTrace
from hashbench.core.errors import HashbenchError
from hashbench.core.run.outputs import bitwise_equal
from hashbench.core.run.settings import preserved
from hashbench.core.suites import registry
from hashbench.tools.bitwise import BitwiseEquivalenceMode, BitwiseMismatchError, BitwiseMismatchWarning

CALLS = itertools.count()
BUFFER = torch.zeros(4)


@torch.library.custom_op("bitwise_test::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    """Another value in every call."""
    return x + float(next(CALLS))


@torch.library.custom_op("bitwise_test::count_gradient", mutates_args=())
def count_gradient(grad: torch.Tensor) -> torch.Tensor:
    return grad + float(next(CALLS))


count.register_autograd(lambda _, grad: count_gradient(grad))


@torch.library.custom_op("bitwise_test::chosen", mutates_args=())
def chosen(values: torch.Tensor) -> torch.Tensor:
    """One row after the other, call by call."""
    return values[next(CALLS) % len(values)].clone()


@torch.library.custom_op("bitwise_test::number", mutates_args=())
def number(x: torch.Tensor) -> float:
    return x.item() * (-1 if next(CALLS) % 2 else 1)


@torch.library.custom_op("bitwise_test::draw", mutates_args=())
def draw(x: torch.Tensor) -> torch.Tensor:
    return x + random.random() + np.random.rand()


@torch.library.custom_op("bitwise_test::draw_once_more_each_time", mutates_args=())
def draw_once_more_each_time(x: torch.Tensor) -> torch.Tensor:
    for _ in range(next(CALLS)):
        torch.rand(1)
    return x.clone()


@torch.library.custom_op("bitwise_test::secretly_add", mutates_args=())
def secretly_add(x: torch.Tensor) -> torch.Tensor:
    """Writes what its schema does not declare."""
    x.numpy()[...] += 1
    return x * 2


@torch.library.custom_op("bitwise_test::secretly_count", mutates_args=())
def secretly_count(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[...] = next(CALLS)
    return torch.zeros_like(x)


@torch.library.custom_op("bitwise_test::where_it_lies", mutates_args=("x",))
def where_it_lies(x: torch.Tensor) -> int:
    """The address modulo 64, by which kernels choose their code."""
    return x.data_ptr() % 64


@torch.library.custom_op("bitwise_test::partly", mutates_args=())
def partly(x: torch.Tensor, *, noise: bool) -> torch.Tensor:
    """The second half stays as the memory was, and whoever had that memory before wrote another number at each call."""
    number = float(next(CALLS))
    others = []
    for _ in range(100):  # until the memory is what had been used before, and not fresh from the system
        former = [torch.full((2048,), number) for _ in range(64)]
        del former
        found = torch.empty(2048)
        if found[1024:].eq(number).all():
            break
        others.append(found)
    found[:1024] = x + number if noise else x
    return found


@torch.library.custom_op("bitwise_test::fail_when_repeated", mutates_args=())
def fail_when_repeated(x: torch.Tensor, *, text: str) -> torch.Tensor:
    if next(CALLS) % 2:
        raise RuntimeError(text)
    return x.clone()


@torch.library.custom_op("bitwise_test::add_other", mutates_args=("x",))
def add_other(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y.to_dense())


@pytest.fixture(autouse=True)
def _counted_from_zero() -> Iterator[None]:
    global CALLS
    CALLS = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitwiseMismatchWarning)
        yield


class NoOp(torch.utils._python_dispatch.TorchDispatchMode):
    """What any mode does to a program: some formulas of torch's are others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def small_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 5),
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def trained(mode: AbstractContextManager[Any], optimizer: str, *, amp: bool = False) -> list[torch.Tensor]:
    """All that two training steps leave, and the generator's state."""
    net = small_net()
    updater, images = OPTIMIZERS[optimizer](net.parameters()), torch.randn(2, 3, 8, 8)
    with mode:
        for _ in range(2):
            updater.zero_grad()
            with torch.autocast("cpu", enabled=amp):
                loss = net(images).square().mean()
            loss.backward()
            updater.step()
    left = [loss, *net.state_dict().values(), *(p.grad for p in net.parameters())]
    return [value.detach() for value in left] + [torch.get_rng_state()]


# ------------------------------------------------------------------------------------- the program notices nothing


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_step_is_the_same_bits_under_the_mode(optimizer: str, amp: bool) -> None:
    mode = BitwiseEquivalenceMode(raise_on_mismatch=True)

    plain, checked = trained(NoOp(), optimizer, amp=amp), trained(mode, optimizer, amp=amp)

    assert all(map(bitwise_equal, plain, checked))
    assert mode.checked["aten.native_batch_norm.default"] == 2
    assert any("_adam" in op or "_foreach" in op or "add_" in op for op in mode.checked)
    assert not mode.get_mismatches()
    assert not mode.unchecked


def draws_from_python_and_numpy() -> tuple[Any, ...]:
    return draw(torch.zeros(2)), random.random(), np.random.rand()


@pytest.mark.parametrize(
    "draw_numbers",
    [
        pytest.param(lambda _: torch.randn(100), id="randn"),
        pytest.param(lambda _: torch.randperm(100), id="randperm"),
        pytest.param(lambda _: torch.zeros(100).bernoulli_(0.5), id="in place"),
        pytest.param(lambda generator: torch.randn(10, generator=generator), id="generator among the arguments"),
        pytest.param(lambda _: draws_from_python_and_numpy(), id="somebody else's op, from Python and NumPy"),
    ],
)
def test_random_numbers_are_drawn_once(draw_numbers: Callable[[torch.Generator], Any]) -> None:
    def drawn(mode: AbstractContextManager[Any]) -> list[Any]:
        random.seed(1), np.random.seed(1), torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5)
        with mode:
            numbers = draw_numbers(generator)
        return [*torch.utils._pytree.tree_leaves(numbers), torch.get_rng_state(), generator.get_state()]

    mode = BitwiseEquivalenceMode(raise_on_mismatch=True, runs=3)

    assert all(map(bitwise_equal, drawn(nullcontext()), drawn(mode)))
    assert sum(mode.checked.values())


def test_generators_are_put_back_after_a_repetition_that_raises_or_draws_more() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()

    with pytest.raises(BitwiseMismatchError), BitwiseEquivalenceMode(raise_on_mismatch=True):
        fail_when_repeated(torch.zeros(1), text="no")
    assert torch.equal(torch.get_rng_state(), state)

    global CALLS
    CALLS = itertools.count()
    with BitwiseEquivalenceMode():
        draw_once_more_each_time(torch.zeros(1))  # draws nothing in its first run
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_filters_and_exceptions_of_the_program_stay() -> None:
    filters = list(warnings.filters)
    with BitwiseEquivalenceMode() as mode, torch.no_grad():
        assert not torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.zeros(2) + torch.zeros(3)
        torch.ones(2).exp()

    assert mode.checked["aten.exp.default"] == 1
    assert not mode.get_mismatches()
    assert warnings.filters == filters
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients(around: Callable[[], AbstractContextManager[None]]) -> None:
    with around(), BitwiseEquivalenceMode(raise_on_mismatch=True) as mode:
        small_net()(torch.randn(2, 3, 8, 8))
    assert sum(mode.checked.values()) >= 5
    assert not mode.unchecked


def test_nothing_is_kept_from_call_to_call() -> None:
    x = torch.zeros(3)

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with BitwiseEquivalenceMode() as mode:
        x.add_(1)
        before = living()
        for _ in range(20):
            x.add_(1)
            count(x)
        after = living()
    assert len(mode.get_mismatches()) == 20
    assert after <= before  # fewer where a thread of an earlier test ended meanwhile


# ------------------------------------------------------------------------------------------ inputs of the second run


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
def test_copies_lie_as_the_original_modulo_64(offset: int) -> None:
    memory = torch.zeros(100)
    with BitwiseEquivalenceMode(runs=3) as mode:
        where_it_lies(memory[offset:])
    assert mode.checked
    assert not mode.get_mismatches()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: torch.add(x, x, out=torch.empty(0)), id="out that is resized"),
        pytest.param(lambda x: torch.sort(x, out=(torch.empty(8), torch.empty(8, dtype=torch.int64))), id="two outs"),
        pytest.param(lambda x: x.index_put_((torch.tensor([1, 1]),), x[:2].clone(), accumulate=True), id="indices"),
        pytest.param(lambda x: torch._foreach_mul_([x[:4], x[4:], x[:4]], 2.0), id="lists of views"),
        pytest.param(lambda x: x.view(torch.complex64).conj().mul_(2j), id="conjugate"),
        pytest.param(lambda x: x.as_strided((3, 3), (1, 2)).copy_(torch.ones(3, 3)), id="overlapping in itself"),
        pytest.param(lambda x: x[1:7:2].mul_(x[:3]), id="reads what it writes"),
        pytest.param(lambda x: x[:0].add_(1), id="no elements"),
        pytest.param(lambda x: x.to(torch.float8_e4m3fn).copy_(x), id="float8"),
        pytest.param(
            lambda x: torch.nn.functional.batch_norm(x.view(2, 4), x[:4] * 0, x[4:] + 1, training=True), id="norm"
        ),
    ],
)
def test_ops_that_write_give_the_same_with_and_without(call: Callable[[torch.Tensor], Any]) -> None:
    one, other = torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)
    with NoOp():
        expected = call(one)
    with BitwiseEquivalenceMode(raise_on_mismatch=True, runs=3) as mode:
        found = call(other)

    assert bitwise_equal(one, other)
    for left, right in zip(
        torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True
    ):
        assert left is right is None or bitwise_equal(left, right)
    assert mode.checked
    assert not mode.unchecked


def test_an_undeclared_write_of_somebody_elses_op_happens_once() -> None:
    x = torch.zeros(3)
    with BitwiseEquivalenceMode(raise_on_mismatch=True):
        assert secretly_add(x).tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


def test_no_schema_is_believed_where_that_is_asked_for() -> None:
    x = torch.ones(3)
    with BitwiseEquivalenceMode(raise_on_mismatch=True, trust_schema=False) as mode:
        trained(nullcontext(), "foreach")
        x.exp()
    assert mode.checked["aten.exp.default"] == 1
    assert not mode.unchecked


# --------------------------------------------------------------------------------------------------- what is found


def test_a_mismatch_is_recorded_with_its_numbers_and_place_and_the_keys_of_the_older_tool() -> None:
    with BitwiseEquivalenceMode() as mode:
        count(torch.zeros(2, 3))

    (found,) = mode.get_mismatches()
    assert (found.op, found.place, found.run, found.runs_differing) == ("bitwise_test.count.default", "output", 2, 1)
    assert (found.shape, found.dtype, found.phase) == ((2, 3), "float32", "forward")
    assert found.difference is not None
    assert (found.difference.elements, found.difference.max_abs) == (6, 1.0)
    assert found.source.startswith("test_mode.py:")
    assert "6 of 6 elements, by at most 1" in mode.report()
    assert isinstance(hash(found), int)
    assert mode.mismatches == [found]
    assert dict(found) == {
        "function": "bitwise_test.count.default",
        "tensor1_shape": torch.Size([2, 3]),
        "tensor2_shape": (2, 3),
        "max_diff": 1.0,
    }
    assert found.get("other") is None


@torch.library.custom_op("bitwise_test::longer", mutates_args=())
def longer(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(3 + next(CALLS))


@torch.library.custom_op("bitwise_test::one_more", mutates_args=())
def one_more(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + number for number in range(next(CALLS) + 1)]


DIFFERING: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    "different content": (count, "output", "output differs in 1 of 1 repetitions: 1 of 1 elements, by at most 1"),
    "different shape": (longer, "output", "shapes [3] and [4]"),
    "an output that only a further run has": (one_more, "output.1", "shapes none and [1]"),
    "a number": (lambda x: number(x + 1), "output", "output differs in 1 of 1 repetitions: its content"),
    "an undeclared write": (secretly_count, "argument 0", "1 of 1 elements, by at most 1"),
    "more random numbers": (draw_once_more_each_time, "generator cpu", "its content"),
    "an error": (lambda x: fail_when_repeated(x, text="not twice"), "", "run 2 raised RuntimeError: not twice"),
}


@pytest.mark.parametrize(("call", "place", "text"), DIFFERING.values(), ids=DIFFERING)
def test_what_differs_is_named_and_the_first_runs_value_goes_on(
    call: Callable[[torch.Tensor], Any], place: str, text: str
) -> None:
    global CALLS
    plain = call(torch.zeros(1))
    CALLS = itertools.count()
    with BitwiseEquivalenceMode(count_unwritten=True) as mode:
        under_the_mode = call(torch.zeros(1))

    assert [found.place for found in mode.get_mismatches()] == [place]
    assert text in mode.get_mismatches()[0].text()
    assert bool(mode.get_mismatches()[0]["max_diff"] == "Shape mismatch") == ("shapes" in text)
    assert all(map(bitwise_equal, *map(torch.utils._pytree.tree_leaves, (plain, under_the_mode))))


def test_raising_and_warning_name_the_op() -> None:
    said = r"Bitwise mismatch detected in bitwise_test\.count"
    mode = BitwiseEquivalenceMode(raise_on_mismatch=True)
    with pytest.raises(RuntimeError, match=said) as caught, mode:
        count(torch.zeros(1))
    assert isinstance(caught.value, BitwiseMismatchError)
    assert list(caught.value.mismatches) == mode.get_mismatches() != []
    with pytest.warns(BitwiseMismatchWarning, match=said), BitwiseEquivalenceMode():
        count(torch.zeros(1))


class Counting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return count(x)


def test_a_backward_op_belongs_to_a_forward_line_and_module() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Counting())
    with BitwiseEquivalenceMode(ops=["bitwise_test.count", "bitwise_test.count_gradient"]) as mode:
        net(torch.ones(1, 2)).sum().backward()

    forward, backward = mode.get_mismatches()
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert backward.forward_op == "bitwise_test.count.default"
    assert backward.module == "Sequential.1"
    assert backward.forward_source == forward.source
    assert forward.source.endswith("forward")
    assert "forward call: bitwise_test.count.default in Sequential.1, at test_mode.py" in mode.report()

    raised = pytest.raises(BitwiseMismatchError, match=r"forward call: .* in Counting, at test_mode\.py:\d+ forward")
    with raised, BitwiseEquivalenceMode(raise_on_mismatch=True, ops="bitwise_test.count_gradient"):
        Counting()(torch.ones(2, requires_grad=True)).sum().backward()


def test_an_optimizers_ops_have_their_phase_and_nothing_watches_afterwards() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: [count(torch.zeros(1))].clear())
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with BitwiseEquivalenceMode(ops="bitwise_test.count") as mode:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert [found.phase for found in mode.get_mismatches()] == ["optimizer"]
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_backward_of_a_forward_that_is_computed_again_has_its_line(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Counting())
    with BitwiseEquivalenceMode(ops="bitwise_test.count_gradient") as mode:
        checkpoint(net, torch.ones(1, 2, requires_grad=True), use_reentrant=reentrant).sum().backward()

    (found,) = mode.get_mismatches()
    assert found.forward_op == "bitwise_test.count.default"
    assert found.forward_source.endswith("forward")


class Deep(torch.autograd.Function):
    """Calls backward in backward; from a depth of 60 on autograd goes on in threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Deep.apply(inner, ctx.depth - 1).backward()
            return grad, None
        import threading

        DEEP_THREADS.append(threading.current_thread() is threading.main_thread())
        return count(grad), None


DEEP_THREADS: list[bool] = []


def test_ops_in_autograds_threads_are_checked() -> None:
    with BitwiseEquivalenceMode() as mode:
        Deep.apply(torch.ones(1, requires_grad=True), 70).backward()

    assert DEEP_THREADS == [False]
    assert [found.op for found in mode.get_mismatches()] == ["bitwise_test.count.default"]
    assert mode.get_mismatches()[0].phase == "backward"


@pytest.mark.parametrize(
    ("runs", "values", "expected"),
    [
        pytest.param(2, [1.0, 1.0, 1.0, 2.0], [], id="two runs miss a rare difference"),
        pytest.param(4, [1.0, 1.0, 1.0, 2.0], [(4, 1, 4)], id="more runs see it"),
        pytest.param(4, [1.0, 2.0, 3.0, 4.0], [(2, 3, 4)], id="each differs"),
    ],
)
def test_runs_that_differ_are_counted(runs: int, values: list[float], expected: list[tuple[int, ...]]) -> None:
    with BitwiseEquivalenceMode(runs=runs) as mode:
        chosen(torch.tensor(values)[:, None])
    assert [(found.run, found.runs_differing, found.runs) for found in mode.get_mismatches()] == expected


def test_a_python_number_is_compared_by_bits_or_by_value() -> None:
    with BitwiseEquivalenceMode(equal="values") as by_value:
        number(torch.zeros(1))
    with BitwiseEquivalenceMode() as by_bits:
        number(torch.zeros(1))
        assert torch.tensor([2.5]).item() == 2.5

    assert not by_value.get_mismatches()
    assert [found.op for found in by_bits.get_mismatches()] == ["bitwise_test.number.default"]
    assert by_bits.checked["aten._local_scalar_dense.default"] == 1


# -------------------------------------------------------------------------------------------- memory nobody wrote


@pytest.mark.parametrize(
    ("noise", "options", "found", "listed"),
    [
        pytest.param(False, {"runs": 3}, False, True, id="listed, and no mismatch"),
        pytest.param(True, {}, True, False, id="what was written differs as well"),
        pytest.param(False, {"count_unwritten": True}, True, False, id="counted where that is asked for"),
    ],
)
def test_an_output_that_is_unwritten_in_part(noise: bool, options: dict[str, Any], found: bool, listed: bool) -> None:
    with BitwiseEquivalenceMode(**options) as mode:
        partly(torch.zeros(1), noise=noise)

    assert bool(mode.get_mismatches()) == found
    assert [(each.op, each.place) for each in mode.unwritten] == [("bitwise_test.partly.default", "output")] * listed
    assert ("unwritten elements that differ" in mode.report()) == listed


# ------------------------------------------------------------------------------------------- named as not checked


def reasons(mode: BitwiseEquivalenceMode) -> dict[str, str]:
    return {found.op: found.reason for found in mode.unchecked}


def test_allocations_and_views_are_left_alone_and_need_no_mention() -> None:
    with BitwiseEquivalenceMode() as mode:
        x = torch.empty(4)
        x.view(2, 2).t().split(1)
        x.new_empty(3).resize_(5)
        torch.empty_like(x)
    assert not mode.checked
    assert not mode.unchecked


def test_a_collective_is_made_once(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with BitwiseEquivalenceMode(raise_on_mismatch=True) as mode:
            x = torch.ones(3)
            dist.all_reduce(x)
            total = functional.all_reduce(x, "sum", dist.group.WORLD) + 1
    finally:
        dist.destroy_process_group()
    assert total.tolist() == [2.0] * 3
    assert {"c10d.allreduce_.default", "_c10d_functional.all_reduce.default"} <= set(reasons(mode))
    assert mode.checked["aten.add.Tensor"] == 1


def into_buffer() -> None:
    library = torch.library.Library("bitwise_static", "DEF")  # custom_op refuses such an op, a library does not
    library.define("into_buffer(Tensor x) -> Tensor")
    library.impl("into_buffer", lambda x: BUFFER.copy_(x), "CPU")
    try:
        torch.ops.bitwise_static.into_buffer(torch.ones(4))
    finally:
        library._destroy()


def without_memory() -> None:
    fail_when_repeated(torch.ones(1), text="DefaultCPUAllocator: can't allocate memory")


def shared_with_sparse() -> None:
    values = torch.ones(2)
    add_other(values, torch.sparse_coo_tensor([[0, 1]], values, (2,), is_coalesced=True, check_invariants=False))
    assert values.tolist() == [2.0, 2.0]


def without_schema() -> None:
    from torch._ops import HigherOrderOperator

    class Twice(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("bitwise_test_twice")

        def __call__(self, x: torch.Tensor) -> Any:
            return super().__call__(x)

    def below_autograd(x: torch.Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return twice(x)

    twice = Twice()
    twice.py_impl(torch._C.DispatchKey.AutogradCPU)(below_autograd)
    twice.py_impl(torch._C.DispatchKey.CPU)(lambda x: x * 2)
    assert twice(torch.ones(1)).item() == 2.0


UNCHECKED = {
    "all runs write the same memory": (into_buffer, "bitwise_static.into_buffer.default", "the same memory"),
    "no memory": (without_memory, "bitwise_test.fail_when_repeated.default", "run 2 ran out of memory"),
    "memory shared with a sparse tensor": (
        shared_with_sparse, "bitwise_test.add_other.default", "it writes memory that a sparse_coo tensor shares"),
    "no schema": (without_schema, "bitwise_test_twice", "no schema"),
    "no content": (lambda: torch.ones(3, device="meta") + 1, "aten.add.Tensor", "meta"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "op", "reason"), UNCHECKED.values(), ids=UNCHECKED)
def test_what_cannot_be_repeated_is_named_and_never_called_equal(
    call: Callable[[], object], op: str, reason: str
) -> None:
    with BitwiseEquivalenceMode() as mode:
        call()

    assert reason in reasons(mode)[op]
    assert op not in mode.checked
    assert not mode.get_mismatches()


def test_fake_tensors_are_never_called_equal() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), BitwiseEquivalenceMode() as inside:
        torch.ones(3).exp()
    with BitwiseEquivalenceMode() as outside, FakeTensorMode():
        torch.ones(3).exp()
    assert not inside.checked + outside.checked


# --------------------------------------------------------------------------------------------- other kinds of tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize_per_tensor", "ignore:.*nested tensors")
def test_sparse_quantized_and_nested_tensors_are_checked() -> None:
    indices = torch.tensor([[0, 1, 1]])
    with BitwiseEquivalenceMode(raise_on_mismatch=True) as mode:
        sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (4, 2), check_invariants=False).coalesce()
        torch.zeros(4, 2).add_(sparse)
        torch.eye(3).to_sparse_csr().matmul(torch.ones(3, 2))
        quantized = torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.quint8)
        quantized.dequantize().relu()
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).mul(2)
    assert {"aten._coalesce.default", "aten.quantize_per_tensor.default"} <= set(mode.checked)
    assert not mode.unchecked


def test_a_subclass_is_checked_by_the_tensors_in_it() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    with BitwiseEquivalenceMode() as mode:
        found = pair + pair
        count(pair.a)
    assert isinstance(found, TwoTensor)
    assert found.a.tolist() == [2.0, 2.0]
    assert mode.checked["aten.add.Tensor"] == 2
    assert len(mode.get_mismatches()) == 1


# -------------------------------------------------------------------------------------------------- nested modes


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_another_mode_sees_every_op_once(inside: bool) -> None:
    mode = BitwiseEquivalenceMode(raise_on_mismatch=True)

    def under(other: AbstractContextManager[Any], checked: AbstractContextManager[Any]) -> None:
        net, images = small_net(), torch.randn(2, 3, 8, 8)
        first, second = (checked, other) if inside else (other, checked)
        with first, second:
            net(images).sum().backward()

    traces, counters = (
        [HashDebugTrace(tracer="python") for _ in range(2)],
        [FlopCounterMode(display=False) for _ in range(2)],
    )
    for other, checked in zip((*traces, *counters), (mode, nullcontext()) * 2, strict=True):
        under(other, checked)
    assert traces[0].finish().records == traces[1].finish().records
    assert counters[0].get_total_flops() == counters[1].get_total_flops() > 0
    assert mode.checked["aten.convolution.default"] == 2


def test_the_mode_inside_itself() -> None:
    with BitwiseEquivalenceMode() as outer, BitwiseEquivalenceMode() as inner:
        count(torch.zeros(1))
    assert len(inner.get_mismatches()) == len(outer.get_mismatches()) == 1


# ---------------------------------------------------------------------------------------------------- the specimens


@pytest.fixture
def eight_threads() -> Iterator[None]:
    """They meet also on one busy core, where two hardly ever do."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize(
    ("name", "op", "module"),
    [
        ("slot_memory", "aten.index_put_.default", "SlotMemory"),
        ("affinity_smoothing", "aten.add_.Tensor", "AffinitySmoothing"),
        ("tone_curve", "aten.put.default", "ToneCurve"),
        ("segment_pooling", "zoo.segment_sum.default", "SegmentPooling"),
    ],
)
def test_a_specimens_kernel_is_named_and_its_twin_is_clean(name: str, op: str, module: str) -> None:
    specs = {spec.name: spec for spec in registry.catalog("specimens")}

    def differing(planted: str) -> set[tuple[str, str]]:
        torch.manual_seed(0)
        workload = registry.load(specs[planted], mode="inference")
        workload.module.requires_grad_(name == "tone_curve")
        with BitwiseEquivalenceMode(runs=4) as mode:
            output = workload.module(*workload.inputs)
            if name == "tone_curve":
                output.mean().backward()
        assert mode.checked
        return {(each.op, each.module.partition(".")[0]) for each in mode.get_mismatches()}

    assert differing(name) == {(op, module)}
    assert differing(f"{name}_twin") == set()


# ------------------------------------------------------------------------------------------------- on an accelerator


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def attention_step(mode: BitwiseEquivalenceMode, *, deterministic: bool) -> None:
    """What the older tool was tested with: the memory-efficient attention, whose backward adds in any order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    shapes = ((1, 128, 8, 64), (1, 1024, 8, 64), (1, 1024, 8, 64))
    query, key, value = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True).transpose(1, 2) for shape in shapes
    )
    with preserved():
        torch.use_deterministic_algorithms(deterministic)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        with mode, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()


@pytest.mark.gpu
@NEEDS_CUDA
def test_attention_is_named_without_deterministic_algorithms_alone() -> None:
    mode = BitwiseEquivalenceMode(raise_on_mismatch=True, runs=10)
    attention_step(mode, deterministic=True)
    assert not mode.get_mismatches()
    with pytest.raises(RuntimeError, match=r"aten\._scaled_dot_product_efficient_attention_backward"):
        attention_step(mode, deterministic=False)


@pytest.mark.gpu
@NEEDS_CUDA
def test_random_numbers_of_a_device_are_drawn_once() -> None:
    torch.cuda.manual_seed(3)
    expected, state = torch.randn(100, device="cuda"), torch.cuda.get_rng_state()

    torch.cuda.manual_seed(3)
    with BitwiseEquivalenceMode(raise_on_mismatch=True):
        found = torch.randn(100, device="cuda")

    assert bitwise_equal(expected, found)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------ the documentation


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "bitwise.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["Detected 0 mismatches", "6 calls of 5 ops run 2 times: 0 mismatches"]


# ------------------------------------------------------------------------------------------------------ which ops


@pytest.mark.parametrize(
    "ops",
    [
        "aten.exp",
        "aten::exp",
        "aten.exp.default",
        torch.ops.aten.exp,
        torch.ops.aten.exp.default,
        ["aten.exp", torch.ops.aten.mm],
        lambda func: func is torch.ops.aten.exp.default,
    ],
    ids=["dots", "colons", "overload by name", "packet", "overload", "list", "function"],
)
def test_only_the_ops_asked_for(ops: Any) -> None:
    with BitwiseEquivalenceMode(ops=ops) as mode:
        torch.ones(2).exp().log()
    assert mode.checked == {"aten.exp.default": 1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"ops": "aten.index_putt_"},
            r"the op 'aten.index_putt_' does not exist: nothing would be checked. .*aten.index_put_",
        ),
        ({"ops": "index_put_"}, r"the op 'index_put_' does not exist.*aten\.index_put_"),
        ({"ops": "aten.add.NoSuch"}, r"the op 'aten.add.NoSuch' does not exist"),
        ({"ops": "."}, r"the op '\.' does not exist"),
        ({"ops": []}, r"ops= is empty"),
        ({"ops": [3]}, r"ops= holds a int"),
        ({"ops": 3}, r"ops= holds a int"),
        ({"runs": 1}, r"runs must be >= 2, got 1: nothing would be compared"),
        ({"runs": True}, r"runs must be an int >= 2, got True"),
        ({"runs": 2.5}, r"runs must be an int >= 2, got 2.5"),
        ({"equal": "nearly"}, r"equal must be 'bits' or 'values', got 'nearly'"),
    ],
)
def test_nonsense_is_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(HashbenchError, match=text) as caught:
        BitwiseEquivalenceMode(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_generator_state_of_attention_counts_with_dropout_only(dropout: float) -> None:
    library = torch.library.Library("hashbench_bitwise_attention", "DEF")
    try:
        library.define("forward(Tensor query, float dropout_p=0.) -> (Tensor output, Tensor philox_seed)")
        garbage = itertools.count()
        library.impl("forward", lambda query, *_: (query * 2, torch.tensor(next(garbage))), "CPU")
        with BitwiseEquivalenceMode(runs=3) as mode:
            torch.ops.hashbench_bitwise_attention.forward(torch.ones(3), dropout)
        assert bool(mode.get_mismatches()) == (dropout > 0)
    finally:
        library._destroy()
