"""The Triton kernel, in Triton's interpreter on the CPU, against the reference; and that it compiles for real GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from hashbench.core.devices.reference import bytes_of
from tests.core.devices import interpreted_cases

pytestmark = pytest.mark.slow
WITHOUT_TRITON = importlib.util.find_spec("triton") is None
"""It comes with torch's builds for GPUs on Linux."""


@pytest.fixture(scope="module")
def sums() -> dict[str, tuple[int, int]]:
    """What the reference and the kernel found, by case: in a process of its own, for triton reads the variable once."""
    if WITHOUT_TRITON:
        pytest.skip("needs triton")
    command = [sys.executable, interpreted_cases.__file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: tuple(pair) for name, pair in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", interpreted_cases.DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 300])
def test_kernel_equals_the_reference_for_every_dtype(
    dtype: torch.dtype, count: int, sums: dict[str, tuple[int, int]]
) -> None:
    expected, found = sums[f"{dtype} {count}"]
    assert found == expected != 0


@pytest.mark.parametrize("count", interpreted_cases.COUNTS)
def test_kernel_equals_the_reference_for_every_size(count: int, sums: dict[str, tuple[int, int]]) -> None:
    expected, found = sums[f"{count} bytes"]
    assert found == expected


@pytest.mark.parametrize("offset", interpreted_cases.OFFSETS)
def test_kernel_reads_in_place_at_every_address(offset: int, sums: dict[str, tuple[int, int]]) -> None:
    found, expected = sums[f"alignment {offset}"]
    assert found == expected
    expected, found = sums[f"offset {offset}"]
    assert found == expected


@pytest.mark.parametrize("geometry", interpreted_cases.GEOMETRIES, ids="block {0[0]}, programs {0[1]}".format)
def test_geometry_changes_nothing(geometry: tuple[int, int], sums: dict[str, tuple[int, int]]) -> None:
    expected, found = sums[f"geometry {geometry}"]
    assert found == expected


def test_a_sum_is_added_to_what_is_there(sums: dict[str, tuple[int, int]]) -> None:
    expected, found = sums["added"]
    assert found == expected


def test_dense_tensors_are_read_in_memory_order_without_a_copy(sums: dict[str, tuple[int, int]]) -> None:
    assert len({sums[f"order {order}"] for order in interpreted_cases.ORDERS}) == 1
    tensor = torch.randn(2, 3, 5, 7).permute(0, 3, 1, 2)
    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hashbench.core.devices.triton_kernel import word_sums

per_word = int(sys.argv[1])
types = {"data": "*u8", "totals": "*i64", "place": "i32", "words": "i64", "tail": "i32"}
types |= {"per_word": "constexpr", "block": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]]} if per_word == 1 else {}
source = ASTSource(fn=word_sums, signature=types, constexprs={(5,): per_word, (6,): 2048}, attrs=aligned)
built = compile(source, target=GPUTarget("cuda", int(sys.argv[2]), 32))
print(len(built.asm["cubin"]), built.asm["ptx"].count("ld.global.v2.b64"))
print(built.asm["ttir"])
"""


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_TRITON, reason="needs triton")
@pytest.mark.parametrize(("per_word", "capability"), [(1, 90), (4, 80)])
def test_kernel_compiles_for_gpus(per_word: int, capability: int) -> None:
    """Triton's compiler needs no GPU. Whole words at an aligned address are loaded 16 bytes at once."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(per_word), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, _, intermediate = done.stdout.partition("\n")
    size, wide_loads = map(int, first.split())
    assert size > 0
    assert (wide_loads > 0) == (per_word == 1)
    assert_places_are_of_64_bits(intermediate)


def assert_places_are_of_64_bits(intermediate: str) -> None:
    """In Triton's intermediate code: tensors of more than 2**31 elements have places that 32 bits cannot hold. Those of
    32 bits are the lanes of a tail (below 8) and the place among the totals (below 16 384)."""
    moves = re.findall(r"tt\.addptr %(\w+), %(\w+) : (.*?), (\S+) loc", intermediate)
    assert len(moves) >= 4
    narrow = [(pointer, by) for pointer, by, _, kind in moves if "i64" not in kind]
    assert {by.partition("_")[0] for _, by in narrow} <= {"byte", "place"}
    widened = re.search(r"%(\w+) = tt.get_program_id x : i32", intermediate)
    assert widened is not None
    used = re.findall(rf"= (\S+) %{widened[1]} ", intermediate)
    assert "arith.extsi" in used  # before anything is multiplied with it
    assert set(used) <= {"arith.extsi", "arith.cmpi"}
