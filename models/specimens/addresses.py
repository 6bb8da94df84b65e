"""Specimens whose kernel depends on where in memory its inputs lie: equal values elsewhere (origin ``kernel``).

Vector kernels treat the elements before the first aligned address apart, so an address that is shifted by a few bytes
groups the sums in another way. Which library does that, and for which op, depends on the processor; so the operators
here are the specimens' own, and do it on all of them. Memory of torch's own always begins at a multiple of 64 bytes;
that of a view into somebody else's buffer begins anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

ALIGNED = 64 // 4
"""Elements of ``float32`` from one aligned address to the next."""

_POSITIONS = {step: itertools.count(0, step) for step in (1, ALIGNED)}


def sums_of(products: torch.Tensor, *, at: torch.Tensor) -> torch.Tensor:
    """The sums along the last dimension, by neighbours, counted from the last aligned address before ``at`` begins.

    Additions of whole tensors are rounded alike on every processor; ``torch.sum`` is not.
    """
    ahead, length = at.data_ptr() // 4 % ALIGNED, products.shape[-1]
    behind = (1 << (ALIGNED + length - 1).bit_length()) - ahead - length
    sums = nn.functional.pad(products, (ahead, behind))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


@torch.library.custom_op("zoo::correlate", mutates_args=())
def correlate(samples: torch.Tensor, patterns: torch.Tensor) -> torch.Tensor:
    """The dot product of ``samples`` with each of the ``patterns``."""
    return sums_of(samples * patterns, at=samples)


def _keep_samples(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])


def _differentiate_patterns(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    (samples,) = ctx.saved_tensors
    return None, gradient[:, None] * samples


correlate.register_autograd(_differentiate_patterns, setup_context=_keep_samples)


@torch.library.custom_op("zoo::attend", mutates_args=())
def attend(query: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the tokens of ``memory`` (tokens × features), weighted by their likeness to each ``query``, and the
    weights (queries × tokens)."""
    likeness = sums_of(query[..., None, :] * memory[..., None, :, :], at=memory)
    weights = (likeness / query.shape[-1] ** 0.5).softmax(dim=-1)
    return sums_of(weights[..., None, :] * memory.transpose(-1, -2)[..., None, :, :], at=memory), weights


def _keep_weights(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], output[1])


def _differentiate_query(ctx: Any, gradient: torch.Tensor, _of_weights: torch.Tensor) -> tuple[torch.Tensor, None]:
    memory, weights = ctx.saved_tensors
    of_weights = sums_of(gradient[..., None, :] * memory[..., None, :, :], at=memory)
    of_likeness = weights * (of_weights - sums_of(of_weights * weights, at=memory)[..., None])
    products = of_likeness[..., None, :] * memory.transpose(-1, -2)[..., None, :, :]
    return sums_of(products, at=memory) / memory.shape[-1] ** 0.5, None


attend.register_autograd(_differentiate_query, setup_context=_keep_weights)


class RingBuffer:
    """Memory of fixed size in which every record begins ``step`` elements behind the one before."""

    def __init__(self, elements: int, step: int) -> None:
        self.elements, self.step = elements, step
        # Enough for four starts before it begins anew, and for the way to the first aligned address.
        self.memory = bytearray(4 * (elements + 4 * step + ALIGNED))

    def write(self, record: torch.Tensor, positions: Iterator[int]) -> torch.Tensor:
        """``record`` as a view into this memory, at the next of ``positions``."""
        first = torch.frombuffer(self.memory, dtype=torch.float32).data_ptr() // 4
        start = -first % ALIGNED + next(positions) % (4 * self.step)
        view = torch.frombuffer(self.memory, dtype=torch.float32, count=record.numel(), offset=4 * start)
        view.numpy()[:] = record.numpy().ravel()
        return view.view(record.shape)


class MatchedFilter(nn.Module):
    """Correlate the latest second of audio, where it lies in its ring buffer, with learned chirps."""

    def __init__(self, samples: int, chirps: int, *, step: int) -> None:
        super().__init__()
        self.chirps = nn.Parameter(torch.randn(chirps, samples))
        self.detect = nn.Linear(chirps, chirps)
        self.buffer, self.positions = RingBuffer(samples, step), lambda: _POSITIONS[step]

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        window = self.buffer.write(audio, self.positions())
        return self.detect(correlate(window, self.chirps))


def matched_filter(*, step: int) -> Example:
    samples = 4000
    return MatchedFilter(samples, 16, step=step), (torch.randn(samples),)


class PagedAttention(nn.Module):
    """Attend to keys and values that lie in a page of a cache, behind a header of varying length."""

    def __init__(self, features: int, heads: int, tokens: int, *, step: int) -> None:
        super().__init__()
        self.query = nn.Linear(features, features)
        self.mix = nn.Linear(features, features)
        self.heads = heads
        self.page, self.positions = RingBuffer(tokens * features, step), lambda: _POSITIONS[step]

    def forward(self, tokens: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        query, memory = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(tokens), self.page.write(cached, self.positions()))
        )
        attended, _ = attend(query, memory)
        return self.mix(attended.transpose(1, 2).flatten(2))


def paged_attention(*, step: int) -> Example:
    features, heads, tokens = 128, 4, 200
    model = PagedAttention(features, heads, tokens, step=step)
    return model, (torch.randn(1, 1, features), torch.randn(1, tokens, features))


MODELS = {
    "matched_filter": lambda: matched_filter(step=1),
    "matched_filter_twin": lambda: matched_filter(step=ALIGNED),
    "paged_attention": lambda: paged_attention(step=1),
    "paged_attention_twin": lambda: paged_attention(step=ALIGNED),
}
