"""Digests: equal for equal bytes wherever they lie, different for any other byte, no copy where memory is dense."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensor_kinds import KINDS
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.trace.digest import digest, hash_memory, is_dense, python_digest, raw_digest


def value(tensor: torch.Tensor) -> str:
    return digest(tensor).value


DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def filled(dtype: torch.dtype, content: bytes) -> torch.Tensor | None:
    """A tensor of this dtype whose memory is ``content``; None where torch cannot allocate the dtype."""
    try:
        tensor = torch.empty(16, dtype=dtype)
        tensor.untyped_storage().copy_(torch.UntypedStorage(list(content[: tensor.untyped_storage().nbytes()])))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_hashed_by_its_bytes(dtype: torch.dtype) -> None:
    content = bytes(range(256))
    tensor, same = filled(dtype, content), filled(dtype, content)
    other = filled(dtype, content[::-1])
    if tensor is None or same is None or other is None:
        pytest.skip("torch cannot allocate it")
    assert digest(tensor) == digest(same)
    assert value(tensor) != value(other)
    assert digest(tensor).dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5, 17])
def test_the_address_does_not_matter(shift: int) -> None:
    content = torch.rand(100)
    moved = torch.zeros(200)[shift : shift + 100]
    moved.copy_(content)
    odd = np.frombuffer(b"x" * shift + content.numpy().tobytes(), dtype=np.uint8)[shift:]
    assert digest(moved) == digest(content)
    assert hash_memory(odd.ctypes.data, odd.nbytes) == int(value(content), 16)


def _swap(x: torch.Tensor) -> None:
    x[[10, 20]] = x[[20, 10]]


def _one_bit(x: torch.Tensor) -> None:
    x.view(torch.int32)[500] ^= 1


def _pair(x: torch.Tensor) -> None:
    x.view(torch.int32)[3] ^= 1 << 7
    x.view(torch.int32)[4] ^= 1 << 7


def _nan_payload(x: torch.Tensor) -> None:
    x.view(torch.int32)[7] = struct.unpack("<i", struct.pack("<I", 0x7FC00001))[0]


@pytest.mark.parametrize("size", [1_000, 100_000])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_one_bit, id="one bit"),
        pytest.param(_swap, id="two elements swapped"),
        pytest.param(_pair, id="the same bit of two elements"),
        pytest.param(_nan_payload, id="a NaN with a payload"),
        pytest.param(lambda x: x[6].neg_(), id="the sign of zero"),
        pytest.param(lambda x: x.copy_(x.flip(0).clone()), id="reversed"),
        pytest.param(lambda x: x[-1].add_(1), id="the last element"),
    ],
)
def test_any_change_is_seen(change: Callable[[torch.Tensor], Any], size: int) -> None:
    x = torch.arange(1.0, size + 1)
    x[6], x[7] = 0.0, float("nan")
    changed = x.clone()
    change(changed)
    assert value(changed) != value(x)


def test_zeros_of_every_length_differ() -> None:
    lengths = [*range(300), 1024, 4096, 2**20]
    assert len({value(torch.zeros(length, dtype=torch.uint8)) for length in lengths}) == len(lengths)


class Counting(TorchDispatchMode):
    """Counts the bytes that torch ops allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.allocated += out.nbytes
        return out


BASE = torch.arange(24.0)


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        pytest.param(lambda x: x.view(4, 6), True, id="contiguous"),
        pytest.param(lambda x: x.view(4, 6).t(), True, id="transposed"),
        pytest.param(lambda x: x.view(2, 3, 2, 2).to(memory_format=torch.channels_last), True, id="channels last"),
        pytest.param(lambda x: x.view(2, 3, 4).permute(2, 0, 1), True, id="permuted"),
        pytest.param(lambda x: x[3:9], True, id="a slice in one block"),
        pytest.param(lambda x: x.view(1, 24, 1).transpose(0, 2), True, id="with dimensions of one"),
        pytest.param(lambda x: x[::2], False, id="with holes"),
        pytest.param(lambda x: x.view(4, 6)[:, :3], False, id="columns"),
        pytest.param(lambda x: x.expand(2, 24), False, id="expanded"),
        pytest.param(lambda x: x.unfold(0, 4, 2), False, id="overlapping"),
        pytest.param(lambda x: x.flip(0)[::3].expand(2, 8), False, id="expanded with holes"),
        pytest.param(lambda x: x.as_strided((2, 2), (0, 0)), False, id="one element four times"),
    ],
)
def test_dense_tensors_are_hashed_without_a_copy(make: Callable[[torch.Tensor], torch.Tensor], dense: bool) -> None:
    tensor = make(BASE)
    assert is_dense(tensor) == dense
    with Counting() as counted:
        raw_digest(tensor)
    assert (counted.allocated == 0) or not dense
    again = make(BASE.clone())
    assert digest(tensor) == digest(again)
    changed = BASE.clone()
    changed[int(tensor.storage_offset())] += 100
    if tensor.untyped_storage().data_ptr() == BASE.untyped_storage().data_ptr():
        assert value(make(changed)) != value(tensor)


def test_expanded_tensor_is_not_materialized() -> None:
    first, second = torch.rand(4, 1).expand(4, 10**12), torch.rand(4, 1).expand(4, 10**12)
    assert value(first) == value(first) != value(second)


def test_shape_stride_and_dtype_are_told_apart() -> None:
    x = torch.zeros(2, 3)
    kinds = [x, x.view(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(6)]
    assert len({digest(kind) for kind in kinds}) == len(kinds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "first", "second"), KINDS)
def test_tensors_of_other_layouts(make: Callable[[Any], torch.Tensor], first: Any, second: Any) -> None:
    assert digest(make(first)) == digest(make(first))
    assert digest(make(first)).value != digest(make(second)).value


def test_a_tensor_without_data_says_so() -> None:
    assert digest(torch.empty(3, device="meta")).value == "meta"


def test_digest_changes_no_generator_or_gradient() -> None:
    x = torch.rand(4, requires_grad=True)
    y = (x * 2)[::2]
    before = torch.get_rng_state()
    digest(y)
    assert torch.equal(torch.get_rng_state(), before)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (True, 1), ("a", b"a"), (0.0, -0.0), ("1", 1), (None, "None")])
def test_similar_python_values_have_different_digests(first: object, second: object) -> None:
    assert python_digest(first) == python_digest(first)
    assert python_digest(first) != python_digest(second)
