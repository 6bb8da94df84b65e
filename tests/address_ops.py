"""An op that goes by the address of its input on every processor, and which of torch's own kernels do so on this one.

A repro loads this file for the op that it defines, with a Python that has torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ALIGNED = 64 // 4
"""Elements of ``float32`` from one aligned address to the next."""
SHIFTS = (1, 2, 4, 8, 12, 16)
"""Elements by which inputs are moved, the last of them by a whole cache line."""


@torch.library.custom_op("addressed::total", mutates_args=())
def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of ``values``, added up by neighbours, counted from the last aligned address before they begin.

    Additions of whole tensors are rounded alike on every processor, which ``torch.sum`` is not.
    """
    ahead = values.data_ptr() // 4 % ALIGNED
    behind = (1 << (ALIGNED + len(values) - 1).bit_length()) - ahead - len(values)
    sums = torch.nn.functional.pad(values, (ahead, behind))
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums.squeeze(0)


def goes_by_addresses(
    func: Callable[..., torch.Tensor], *inputs: torch.Tensor, said: Callable[[str, object], None]
) -> bool:
    """Whether a kernel gives another result where all inputs, or one of them, lie elsewhere; what comes out is
    ``said``, in the terms of pytest's ``record_property``."""
    there = func(*(_moved(one, 0) for one in inputs))
    places: list[tuple[int, ...]] = []
    for shift in SHIFTS:
        places.append((shift,) * len(inputs))
        places += [tuple(shift * (place == moved) for place in range(len(inputs))) for moved in range(len(inputs))]
    found = any(
        not torch.equal(func(*(_moved(one, by) for one, by in zip(inputs, shifts, strict=True))), there)
        for shifts in places
    )
    name: Any = func
    said("probe", f"{name} {'goes' if found else 'does not go'} by addresses on this machine")
    return found


def _moved(content: torch.Tensor, shift: int) -> torch.Tensor:
    """The same content ``shift`` elements behind an aligned address."""
    memory = content.new_empty(content.numel() + shift)
    return memory[shift:].view(content.shape).copy_(content)
