"""Runs the Triton kernel in Triton's interpreter (TRITON_INTERPRET=1 must be set before triton is imported).

Prints, by case, the sum that the reference finds and the one that the kernel finds, as JSON.
"""

from __future__ import annotations

import json

import torch

from hashbench.core.devices import reference
from hashbench.core.devices.reference import alignment, bytes_of

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
COUNTS = (1, 7, 8, 9, 1023, 1024, 1025, 3072, 5000)
OFFSETS = range(8)
GEOMETRIES = [(block, programs) for block in (16, 64, 2048) for programs in (1, 2, 5, 400)]
ORDERS = [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)]


def noise(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes as ``count`` elements."""
    found = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return found % 2 == 0 if dtype is torch.bool else found.view(dtype)


def both(tensor: torch.Tensor, *, block: int = 128, programs: int = 3, before: int = 0) -> tuple[int, int]:
    """The sum by the reference and by the kernel, each added to ``before``."""
    from hashbench.core.devices import triton_kernel

    expected, found = torch.full((1,), before), torch.full((1,), before)
    reference.accumulate(bytes_of(tensor), expected)
    triton_kernel.accumulate(bytes_of(tensor), found, block=block, programs=programs)
    return int(expected), int(found)


def main() -> None:
    """All cases."""
    torch.manual_seed(0)
    cases = {f"{dtype} {count}": both(noise(count, dtype)) for dtype in DTYPES for count in (1, 7, 300)}
    cases |= {f"{count} bytes": both(noise(count)) for count in COUNTS}
    data = noise(3000)
    cases |= {f"offset {at}": both(data[at : at + 2901]) for at in OFFSETS}
    cases |= {f"alignment {at}": (alignment(data[at:]), (8, 1, 2, 1, 4, 1, 2, 1)[at]) for at in OFFSETS}
    data = noise(9999)
    cases |= {f"geometry {one}": both(data, block=one[0], programs=one[1]) for one in GEOMETRIES}
    cases["added"] = both(data, before=12345)
    tensor = torch.randn(2, 3, 5, 7)
    cases |= {f"order {order}": both(tensor.permute(order)) for order in ORDERS}
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
