"""Synthetic numbers are the same on every machine; recorded content is decoded as encoded."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
import torch
import xxhash

from hashbench.extensions.fingerprint import values

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
def test_synthetic_numbers_have_known_digests(dtype: str, limits: str, digest: str) -> None:
    kind = getattr(torch, dtype)
    made = values.filled(kind, 1000, values=limits, number=1)
    numbers = made.view(kind).double()

    assert xxhash.xxh3_64_hexdigest(made.numpy().tobytes()) == digest
    assert bool(numbers.isfinite().all())
    assert float(numbers.abs().max()) < (1 if limits == values.UNIT else 4)
    assert (float(numbers.min()) >= 0) == (limits != values.ANY)
    assert len(set(numbers.tolist())) > 10


def test_integers_stay_in_range() -> None:
    made = values.filled(torch.int64, 8, values="-3..5", number=0).view(torch.int64)

    assert made.tolist() == [4, -3, -2, 4, 1, 0, 2, 5]
    with pytest.raises(values.NoValuesError, match="is not a range"):
        values.filled(torch.int64, 8, values="9..5", number=0)
    with pytest.raises(values.NoValuesError, match="no synthetic values for quint8"):
        values.filled(torch.quint8, 8, values="", number=0)


@pytest.mark.parametrize("elements", [1, 100, 76736, 76737, values.PERIOD + 1])
def test_integers_do_not_depend_on_the_count(elements: int) -> None:
    """Memory number 1 begins 76736 places before the end of the period, and goes on from its beginning."""
    places = (np.arange(elements) + values.PERIOD - 76736) % values.PERIOD
    made = values.filled(torch.int16, elements, values="-3..5", number=1).view(torch.int16)
    assert np.array_equal(made.numpy(), (values.scrambled(values.PERIOD)[places] % 9).astype(np.int16) - 3)


def test_few_integers_take_little_memory() -> None:
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
def test_content_roundtrip(tensor: torch.Tensor) -> None:
    content, limits = values.content_of(tensor)

    assert limits == ""
    assert torch.equal(values.content_from(content, tensor.dtype, tuple(tensor.shape)), tensor)


def test_large_content_is_kept_as_range() -> None:
    large = values.filled(torch.int64, 100_000, values="4..77", number=0).view(torch.int64)

    assert values.content_of(large) == ("", "4..77")


def test_compression_stops_at_the_limit(
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
def test_range_of(dtype: torch.dtype, numbers: list[float], limits: str) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)

    assert values.range_of(tensor) == limits
    assert values.range_of(torch.stack([tensor, tensor], 1)[:, 0]) == limits


def test_unsupported_dtypes_raise() -> None:
    with pytest.raises(values.NoValuesError, match="no synthetic values for uint16"):
        values.content_of(torch.zeros(3, dtype=torch.uint16))


@pytest.mark.parametrize("content", ["", "9:abcd", "1:abcd", "1:eNpjZAIAAAYAAw==", "4:!!"])
def test_damaged_content_raises(content: str) -> None:
    with pytest.raises(values.NoValuesError):
        values.content_from(content, torch.int64, (7,))


def test_arena_is_reused_and_rooms_are_disjoint() -> None:
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
def test_numbers_repeat_after_a_period(dtype: torch.dtype) -> None:
    made = values.filled(dtype, 2 * values.PERIOD + 5, values=values.ANY, number=1).numpy()
    period = values.PERIOD * dtype.itemsize // (2 if dtype.is_complex else 1)
    assert np.array_equal(made[period:], made[:-period])
    assert not np.array_equal(made[: period // 2], made[period // 2 : period])


def test_no_numbers_without_a_significand() -> None:
    with pytest.raises(values.NoValuesError, match="no synthetic values for float8_e8m0fnu"):
        values.filled(torch.float8_e8m0fnu, 8, values=values.ANY, number=0)


def test_memory_of_the_largest_call_is_reused() -> None:
    arena = values.Arena()
    arena.rooms([2**31], repetition=0)[0][0] = 7
    arena.rooms([2**20], repetition=0)
    assert arena.rooms([2**31], repetition=0)[0][0] == 7
