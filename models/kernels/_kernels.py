"""What the kernels share: inputs from a seed, and loads and stores of a block as in Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Draw a normal float32 tensor of ``shape``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, low: float, high: float, *shape: int) -> torch.Tensor:
    """Draw a uniform float32 tensor of ``shape``."""
    return low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, high: int, *shape: int) -> torch.Tensor:
    """Draw int64 numbers below ``high``, of ``shape``."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def blocks(length: int, size: int) -> Iterator[slice]:
    """Return slices of at most ``size``, up to ``length``."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def load(x: torch.Tensor, start: int, size: int, other: float = 0.0) -> torch.Tensor:
    """Return ``size`` elements of the last dimension from ``start`` as float32; beyond the end: ``other``."""
    block = x[..., start : start + size].float()
    return torch.nn.functional.pad(block, (0, size - block.shape[-1]), value=other)


def store(out: torch.Tensor, start: int, block: torch.Tensor) -> None:
    """Write those elements of a block to the last dimension of ``out`` from ``start`` that lie in it."""
    kept = min(block.shape[-1], out.shape[-1] - start)
    out[..., start : start + kept] = block[..., :kept].to(out.dtype)
