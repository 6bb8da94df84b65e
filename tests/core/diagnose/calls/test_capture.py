"""A captured call replayed unchanged leaves what the original left; what cannot be captured says why."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.diagnose.calls.call import CapturedCall, Slot, TensorForm, plan_for
from hashbench.core.diagnose.calls.capture import CaptureError, capture, capture_arguments, copied
from hashbench.core.diagnose.calls.live import CallOutcome, LiveCall, OutcomeDigests, captured_environment
from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import preserved, settings
from hashbench.core.trace import arguments

aten = torch.ops.aten
LIMIT = 2**26


@torch.library.custom_op("captured::normalised", mutates_args=())
def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).softmax(dim=0)


@torch.library.custom_op("captured::jittered", mutates_args=())
def jittered(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape) + random.random() + random.gauss() + np.random.rand() + np.random.normal()


@torch.library.custom_op("captured::seen_elsewhere", mutates_args=("x",))
def seen_elsewhere(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y.clone()


@torch.library.custom_op("captured::filled_behind", mutates_args=())
def filled_behind(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # the schema does not say so
    return x.sum()


def original(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CapturedCall, OutcomeDigests]:
    """Capture a call, make it, and take its outcome from the very tensors that it was made with."""
    call = capture(func, args, kwargs, limit_bytes=LIMIT)
    with torch.no_grad():
        output = func(*args, **kwargs)
    tensors = [tensor for _, tensor in arguments.named_arguments(args, kwargs)]
    return call, CallOutcome(plan_for(func), args, kwargs, output, tensors).digests()


def replayed(call: CapturedCall, *, times: int = 2, moved: int = 0) -> list[OutcomeDigests]:
    with captured_environment(call):
        live = LiveCall(call, moved)
        found = []
        for _ in range(times):
            live.reset()
            found.append(live.run().digests())
        return found


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fixed numbers that are exact in every dtype of at least 8 bits."""
    count = int(np.prod(shape))
    return (torch.arange(count) * 7 % 5 + 1).reshape(shape).to(dtype)


def aliased() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    base = values(6, 8)
    return aten.add_.Tensor, (base[:, 1:4], base[:, 5:8]), {"alpha": 2}


def from_one_array() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    array = np.arange(40, dtype=np.float32)
    return torch.ops.captured.seen_elsewhere.default, (torch.from_numpy(array[:20]), torch.from_numpy(array[10:30])), {}


def drawing() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    random.gauss(), np.random.normal()  # both make two numbers, and keep one for the next call
    return torch.ops.captured.jittered.default, (values(4),), {}


def misaligned() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    room = bytearray(np.arange(40, dtype=np.float64).tobytes() + b"12345678")
    return aten.sum.default, (torch.frombuffer(room, dtype=torch.float64, offset=4, count=30),), {}


def generated() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    return aten.randn.generator, ([4, 5],), {"generator": generator}


LIBRARY = torch.library.Library("captured", "FRAGMENT")
LIBRARY.define("drawn_from_two(Tensor x, Generator a, Generator b) -> Tensor")


@torch.library.impl(LIBRARY, "drawn_from_two", "CPU")
def drawn_from_two(x: torch.Tensor, a: torch.Generator, b: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=a) - torch.rand(x.shape, generator=b)


def generated_twice() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return torch.ops.captured.drawn_from_two.default, (values(4), generator, generator), {}


def fused_adam() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    def some() -> list[torch.Tensor]:
        return [values(3, 4), values(5)]

    steps = [torch.tensor(2.0), torch.tensor(2.0)]
    settings_of_adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    return aten._fused_adam_.default, (some(), some(), some(), some(), [], steps), settings_of_adam | flags


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([values(2, 3), values(4, 3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_channel(
        values(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
    )


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 0, 0]]), values(3), (3, 3))


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def of(func: Any, *args: Any, **kwargs: Any) -> Call:
    return func, args, kwargs


CALLS: dict[str, Callable[[], Call]] = {
    "two views of one storage, one of them written": aliased,
    "two storages over one memory": from_one_array,
    "memory that torch did not align": misaligned,
    "a transposed slice": lambda: of(aten.mul.Tensor, values(6, 8)[1:4, ::2].t(), values(3)),
    "an expanded tensor": lambda: of(aten.add.Tensor, values(1, 4).expand(3, 4), values(3, 4)),
    "channels last": lambda: of(aten.relu.default, values(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "a conjugated view": lambda: of(
        aten.mm.default, values(3, 3, dtype=torch.complex64).mul(1j).conj(), values(3, 3) * 1j
    ),
    "a negated view": lambda: of(aten.clone.default, torch._neg_view(values(3))),
    "a parameter": lambda: of(aten.add_.Tensor, torch.nn.Parameter(values(3)), values(3)),
    "no elements": lambda: of(aten.add.Tensor, torch.empty(0, 3), torch.empty(0, 3)),
    "a tensor without dimensions": lambda: of(aten.exp.default, torch.tensor(1.5)),
    "bool": lambda: of(aten.logical_not.default, values(9).eq(1)),
    "int16": lambda: of(aten.cumsum.default, values(9, dtype=torch.int16), 0, dtype=torch.int64),
    "half": lambda: of(aten.sum.dim_IntList, values(3, 5, dtype=torch.half), [1], True),
    "bfloat16": lambda: of(aten.mm.default, values(3, 3, dtype=torch.bfloat16), values(3, 3, dtype=torch.bfloat16)),
    "float8": lambda: of(aten._to_copy.default, values(9).to(torch.float8_e4m3fn), dtype=torch.float32),
    "complex128": lambda: of(aten.prod.default, values(4, dtype=torch.complex128) * 1j),
    "sparse": lambda: of(aten.mm.default, sparse(), values(3, 3)),
    "sparse, written": lambda: of(aten.mul_.Tensor, sparse(), torch.tensor(2.0)),
    "sparse rows": lambda: of(aten.mm.default, values(3, 3).to_sparse_csr(), values(3, 3)),
    "quantized": lambda: of(aten.dequantize.self, quantized()),
    "nested": lambda: of(aten.relu.default, nested()),
    "lists with nothing in some places": lambda: of(
        aten.index_put_.default, values(3, 4), [None, torch.tensor([0, 2])], values(3, 2), True
    ),
    "a list of written tensors": lambda: of(aten._foreach_add_.List, [values(3), values(4)], [values(3), values(4)]),
    "a fused optimizer": fused_adam,
    "a tensor given by name": lambda: of(aten.add.out, values(3), values(3), out=torch.empty(0)),
    "a backward kernel": lambda: of(
        aten.convolution_backward.default,
        values(1, 2, 4, 4),
        values(1, 1, 4, 4),
        values(2, 1, 3, 3),
        [2],
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
        [True] * 3,
    ),
    "a norm that writes what its schema omits": lambda: of(
        aten.native_batch_norm.default, values(4, 3), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-05
    ),
    "a generator": generated,
    "one generator, given twice": generated_twice,
    "dropout from the default generator": lambda: of(aten.native_dropout.default, values(50), 0.5, True),
    "growing into its storage": lambda: of(aten.resize_.default, values(100)[:6], [50]),
    "growing": lambda: of(aten.resize_.default, torch.empty(0), [0]),
    "shrinking": lambda: of(aten.resize_.default, values(6), [2, 2]),
    "taking another storage": lambda: of(aten.set_.source_Tensor, torch.empty(0), values(4)),
    "a returned number": lambda: of(aten._local_scalar_dense.default, torch.tensor(0.1)),
    "infinity, not a number and complex scalars": lambda: of(
        aten.full.default,
        [2, 2],
        complex(float("inf"), float("nan")),
        dtype=torch.complex64,
        device=torch.device("cpu"),
        layout=torch.strided,
        pin_memory=False,
    ),
    "a custom op": lambda: of(torch.ops.captured.normalised.default, values(4, 4) / 3),
    "a custom op that draws from every global generator": drawing,
    "a custom op that writes behind its schema": lambda: of(torch.ops.captured.filled_behind.default, values(4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_leaves_what_the_original_left_with(name: str) -> None:
    with preserved_rng():
        call, expected = original(*CALLS[name]())
        assert replayed(call) == [expected, expected]


@pytest.mark.parametrize(
    "name", ["two views of one storage, one of them written", "a fused optimizer", "a conjugated view"]
)
def test_a_replay_in_moved_memory_leaves_the_same(name: str) -> None:
    call, expected = original(*CALLS[name]())
    assert replayed(call, moved=16) == [expected, expected]


# ------------------------------------------------------------------------------------------- a broad sample of ops


@pytest.mark.slow
def test_sampled_ops_replay_to_recorded_digests() -> None:
    # In a process of its own: importing torch's op database changes settings of the whole process for good.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("op_database_replays.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"]
    assert found["seen"] > 500


# --------------------------------------------------------------------------------------------- what is captured


def test_only_the_touched_window_of_a_storage_is_kept() -> None:
    big = torch.zeros(1_000_000)
    call = capture(aten.add_.Tensor, (big[1000:1010], big[1020:1030]), {}, limit_bytes=200)
    (memory,) = call.memories
    assert memory.content.nbytes == 30 * 4 + 4000 % 64
    assert [form.offset for form in call.tensors if isinstance(form, TensorForm)] == [8, 28]
    assert call.nbytes == memory.content.nbytes


def test_arguments_become_slots_in_their_containers() -> None:
    call = capture(*CALLS["lists with nothing in some places"](), limit_bytes=LIMIT)
    assert call.args == (Slot(0), [None, Slot(1)], Slot(2), True)
    assert call.op == "aten.index_put_.default"


def test_settings_are_captured_and_applied() -> None:
    with preserved(), torch.no_grad():
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        call = capture(aten.relu.default, (values(3),), {}, limit_bytes=LIMIT)
    outside = settings()
    assert (call.threads, call.grad_enabled, call.settings["deterministic_algorithms"]) == (3, False, "warn")
    with captured_environment(call):
        assert settings() == call.settings
    assert settings() == outside


class Keeping(TorchDispatchMode):
    """Keeps every call and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[CapturedCall, Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = capture(func, args, kwargs or {}, limit_bytes=LIMIT)
        self.kept.append((call, func(*args, **(kwargs or {}))))
        return self.kept[-1][1]


def test_replay_under_autocast_matches() -> None:
    with torch.autocast("cpu"), Keeping() as mode:
        torch.ops.captured.normalised(values(4, 4) / 3)
        torch.mm(values(4, 4) / 3, values(4, 4))
    assert {output.dtype for _, output in mode.kept} >= {torch.float32, torch.bfloat16}
    for call, output in mode.kept:
        with captured_environment(call):
            again = LiveCall(call).run().output
        assert (again.dtype, again.tolist()) == (output.dtype, output.tolist())


def test_replay_takes_the_branch_below_a_mode() -> None:
    matrix = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    with Keeping() as mode, torch.inference_mode():
        torch.linalg.pinv(matrix)
    (call, output) = next(kept for kept in mode.kept if "pinv" in kept[0].op)
    with captured_environment(call):
        assert torch.equal(LiveCall(call).run().output, output)
    assert not torch.equal(torch.linalg.pinv(matrix), output)


def test_a_capture_draws_nothing_and_writes_nothing() -> None:
    func, args, kwargs = CALLS["dropout from the default generator"]()
    before = torch.get_rng_state(), random.getstate(), args[0].clone()
    capture(func, args, kwargs, limit_bytes=LIMIT)
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert torch.equal(args[0], before[2])


def test_replays_restore_global_generators() -> None:
    call = capture(*CALLS["a custom op that draws from every global generator"](), limit_bytes=LIMIT)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    replayed(call)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == expected


# ------------------------------------------------------------------------------------------------- live copies


def test_a_reset_restores_content_in_the_same_memory() -> None:
    call = capture(*aliased(), limit_bytes=LIMIT)
    with captured_environment(call):
        live = LiveCall(call)
        addresses = [tensor.data_ptr() for tensor in live.tensors]
        before = [tensor.tolist() for tensor in live.tensors]
        live.run()
        assert live.tensors[0].tolist() != before[0]
        live.reset()
        assert [tensor.tolist() for tensor in live.tensors] == before
        assert [tensor.data_ptr() for tensor in live.tensors] == addresses
        assert live.tensors[0].untyped_storage()._cdata == live.tensors[1].untyped_storage()._cdata


def test_reset_restores_resized_storage() -> None:
    call = capture(aten.resize_.default, (values(6), [3000]), {}, limit_bytes=LIMIT)
    with captured_environment(call):
        live = LiveCall(call)
        live.run()
        assert live.tensors[0].shape == (3000,)
        live.reset()
        assert live.tensors[0].tolist() == values(6).tolist()
        assert live.tensors[0].untyped_storage().nbytes() == 24


@pytest.mark.parametrize("moved", [0, 4, 8, 16, 60])
def test_memory_keeps_alignment_plus_shift(moved: int) -> None:
    room = torch.zeros(100)
    start = (64 - room.data_ptr() % 64 + 12) // 4
    call = capture(aten.dot.default, (room[start : start + 9], values(9)), {}, limit_bytes=LIMIT)
    with captured_environment(call):
        found = [tensor.data_ptr() % 64 for tensor in LiveCall(call, moved).tensors]
        alone = [tensor.data_ptr() % 64 for tensor in LiveCall(call, moved, only=0).tensors]
    assert found == [(12 + moved) % 64, moved]
    assert sorted([alone[0] - 12, alone[1]]) in ([0, moved], [moved - 64, 0])


def test_parameters_and_gradients_are_what_they_were() -> None:
    call = capture(aten.add.Tensor, (torch.nn.Parameter(values(3)), values(3).requires_grad_()), {}, limit_bytes=LIMIT)
    with captured_environment(call):
        first, second = LiveCall(call).tensors
    assert isinstance(first, torch.nn.Parameter)
    assert (first.requires_grad, second.requires_grad) == (True, True)
    assert not isinstance(second, torch.nn.Parameter)


# ------------------------------------------------------------------------------------- what cannot be captured


def test_a_call_above_the_limit_says_both_sizes() -> None:
    with pytest.raises(
        CaptureError, match=r"aten.relu.default has 4\.0 MiB of inputs, more than the limit of 1\.0 MiB"
    ):
        capture(aten.relu.default, (torch.zeros(2**20),), {}, limit_bytes=2**20)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def batched() -> torch.Tensor:
    seen: list[torch.Tensor] = []
    torch.vmap(lambda x: seen.append(x) or x)(values(3, 2))
    return seen[0]


REFUSED = {
    "fake tensor": fake,
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "tensor of a transform": batched,
    r"builtins\.object": object,
    r"torch\.storage\.UntypedStorage": lambda: torch.ones(3).untyped_storage(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_the_reason(words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(aten.relu.default, ([REFUSED[words]()],), {}, limit_bytes=LIMIT)


# ------------------------------------------------------------------------------------------ some of the arguments


def test_only_targets_are_copied_with_what_shares_their_memory() -> None:
    memory, read = torch.zeros(8), torch.ones(4)
    target = memory[:4]
    call = capture_arguments(aten.add_.Tensor, (target, read), {}, targets=[target])
    shared = capture_arguments(aten.add_.Tensor, (target, memory[2:6]), {}, targets=[target])
    assert (call.args, call.nbytes) == ((Slot(0), read), 16)
    assert (shared.args, [form.offset for form in shared.tensors]) == ((Slot(0), Slot(1)), [0, 2])
    one, other = LiveCall(shared).tensors
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != memory.data_ptr()


def test_windows_between_the_targets_are_left_out() -> None:
    written = [values(3), values(5)]
    lists = capture_arguments(aten._foreach_add_.List, (written, [values(3), values(5)]), {}, targets=written[1:])
    assert (lists.args[0][1], lists.args[0][0] is written[0], lists.nbytes) == (Slot(0), True, 20)
    assert LiveCall(lists).args[0][1].tolist() == values(5).tolist()


def test_a_sparse_tensor_given_twice_stays_one() -> None:
    one = sparse()
    live = LiveCall(capture(aten.add_.Tensor, (one, one), {}, limit_bytes=LIMIT))
    assert live.args[0] is live.args[1]


def test_written_memory_shared_with_a_sparse_tensor_is_refused() -> None:
    held = values(3)
    holder = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), held, (3,))
    words = "it writes memory that a sparse_coo tensor shares with another argument"
    with pytest.raises(CaptureError, match=words):
        capture(aten.add_.Tensor, (held, holder), {}, limit_bytes=LIMIT)
    with pytest.raises(CaptureError, match=words):
        capture(aten.mul_.Tensor, (holder, held), {}, limit_bytes=LIMIT)
    assert len(capture(aten.mul.Tensor, (held, holder), {}, limit_bytes=LIMIT).tensors) == 2


# -------------------------------------------------------------------------------------------------- single tensors

PLACED = {
    "a slice with holes": values(4, 8)[:, 3:5],
    "an expanded row": values(1, 3).expand(4, 3),
    "a conjugated view": values(3, 3, dtype=torch.complex64).mul(1j)[1:].conj(),
    "no elements": torch.empty(0, 3),
    "sparse": sparse(),
}


@pytest.mark.parametrize("name", PLACED)
def test_copy_keeps_strides_and_address(name: str) -> None:
    tensor = PLACED[name]
    copy = copied(tensor)
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert (copy.stride(), copy.is_conj()) == (tensor.stride(), tensor.is_conj())
        assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("address", [0, 4, 12, 60, 64])
def test_copy_lies_at_the_address_that_is_asked_for(address: int) -> None:
    copy = copied(values(4, 8)[:, 3:5], address=address)
    assert (copy.data_ptr() % 64, copy.stride(), copy.tolist()) == (address % 64, (8, 1), values(4, 8)[:, 3:5].tolist())


# ----------------------------------------------------------------------------------------------- who owns an op


@pytest.mark.parametrize(
    ("func", "custom"),
    [
        (aten.add.Tensor, False),
        (aten._fused_adam_.default, False),
        (torch.ops.prims.add.default, False),
        (torch.ops.quantized.max_pool2d.default, False),
        (torch.ops.captured.jittered.default, True),
        (torch.ops.higher_order.cond, True),
    ],
    ids=str,
)
def test_torch_defines_its_own_ops_only(func: Any, custom: bool) -> None:
    assert is_custom(func) is custom


def test_torch_op_with_user_kernel_is_custom() -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("logaddexp2", lambda x, y: x + y, "CPU")
        assert is_custom(aten.logaddexp2.default)
    finally:
        library._destroy()
        is_custom.cache_clear()
