"""Specimens whose kernel depends on where in memory its inputs lie: equal values elsewhere (origin ``kernel``).

Vector kernels treat the elements before the first aligned address one by one, so an address that is shifted by a few
bytes groups the sums in another way. Memory of torch's own always begins at a multiple of 64 bytes; that of a view into
somebody else's buffer begins anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

ALIGNED = 64 // 4
"""Elements of ``float32`` from one aligned address to the next."""

_POSITIONS = {step: itertools.count(0, step) for step in (1, ALIGNED)}


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
    """Correlate the latest second of audio, where it lies in its ring buffer, with a learned chirp."""

    def __init__(self, samples: int, *, step: int) -> None:
        super().__init__()
        self.chirp = nn.Parameter(torch.randn(samples))
        self.detect = nn.Linear(1, 2)
        self.buffer, self.positions = RingBuffer(samples, step), lambda: _POSITIONS[step]

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        window = self.buffer.write(audio, self.positions())
        return self.detect(torch.dot(window, self.chirp)[None])


def matched_filter(*, step: int) -> Example:
    samples = 4000
    return MatchedFilter(samples, step=step), (torch.randn(samples),)


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
        attended = nn.functional.scaled_dot_product_attention(query, memory, memory)
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
