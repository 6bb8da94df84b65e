"""How far apart kept elements are: exact, in integers, for every floating-point dtype that has synthetic numbers."""

from __future__ import annotations

import base64
import math

import pytest
import torch

from hashbench.core.run.distance import measure
from hashbench.extensions.fingerprint.distance import FLOATS, Distance, distance, value_of


def kept(numbers: list[float], dtype: torch.dtype) -> str:
    content = torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(-1).view(torch.uint8)
    return base64.b64encode(content.numpy().tobytes()).decode()


INFINITE = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([1.0, 2.0], [1.0, 2.0], Distance(2, 0)),
        ([1.0, 2.0], [1.0, 2.5], Distance(2, 1, 2**21, 0.25)),
        ([-1.0], [1.0], Distance(1, 1, 2 * 127 * 2**23, 2.0)),
        ([0.0], [-0.0], Distance(1, 1, 0)),
        ([0.0], [2.0**-149], Distance(1, 1, 1)),
        ([NAN, 4.0], [NAN, 2.0], Distance(2, 1, 2**23, 0.5)),
        ([NAN], [4.0], Distance(1, 1)),
        ([INFINITE], [4.0], Distance(1, 1)),
        ([INFINITE, -2.0], [4.0, -3.0], Distance(2, 2, 2**22, 0.5)),
        ([1.0], [1.0, 2.0], Distance()),
        ([], [], Distance()),
    ],
)
def test_floats(old: list[float], new: list[float], said: Distance) -> None:
    assert distance([("float32", 4, kept(old, torch.float32), kept(new, torch.float32))]) == said


def test_several_outputs_are_taken_together() -> None:
    whole = [base64.b64encode(bytes(numbers)).decode() for numbers in ([1, 2, 3], [1, 2, 4])]
    half = [kept(numbers, torch.bfloat16) for numbers in ([1.0, 2.0], [1.0, 3.0])]
    pairs = [kept(numbers, torch.float32) for numbers in ([1.0, 2.0], [1.0, 4.0])]

    said = distance([("uint8", 1, *whole), ("bfloat16", 2, *half), ("complex64", 8, *pairs), ("float32", 4, "?", "")])

    assert said == Distance(3 + 2 + 1, 3, 2**23, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_the_number_that_torch_takes_them_for(dtype: str) -> None:
    kind = getattr(torch, dtype)
    width = 8 * kind.itemsize
    bits = range(2**width) if width <= 16 else [0, 1, 2**30, 2 ** (width - 1), 2 ** (width - 1) + 12345, 2**23 + 7]
    raw = b"".join(number.to_bytes(kind.itemsize, "little") for number in bits)
    numbers = torch.frombuffer(bytearray(raw), dtype=kind).double().tolist()

    for number, place in zip(numbers, bits, strict=True):
        made = value_of(place, dtype)
        assert (math.isnan(made) and math.isnan(number)) or (made, math.copysign(1, made)) == (
            number,
            math.copysign(1, number),
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_bits_are_as_far_apart_as_torch_says(dtype: str) -> None:
    generator, of_torch = torch.Generator().manual_seed(0), getattr(torch, dtype)
    a, b = (
        torch.randint(0, 256, (500 * of_torch.itemsize,), dtype=torch.uint8, generator=generator).view(of_torch)
        for _ in range(2)
    )
    texts = [base64.b64encode(one.view(torch.uint8).numpy().tobytes()).decode() for one in (a, b)]
    found, expected = distance([(dtype, of_torch.itemsize, *texts)]), measure(a, b)
    assert (found.samples, found.differing, found.max_ulp) == (500, expected.elements, expected.max_ulp)
    assert found.max_relative == expected.max_relative
