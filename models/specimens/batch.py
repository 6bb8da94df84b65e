"""Specimens of batch invariance: what an item of a batch comes out as depends on its batch, or only seems to.

All have a batch of eight items. What couples items does so in any arithmetic; what adds in another order when there are
more rows does so by itself, whatever the processor: the order is in the operator. Twins compute each item by itself,
with ops that round alike for any number of rows; some of them are decoys, whose shape or order says the opposite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hashbench.core.run.workload import Tokens, Workload

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]
Function = Callable[..., object]

ITEMS, WIDTH = 8, 512


def items(*shape: int) -> torch.Tensor:
    """Eight items, each larger than those before it: a maximum or a sum over some of them is not that over all."""
    sizes = torch.arange(1.0, ITEMS + 1).view(-1, *[1] * len(shape))
    return torch.randn(ITEMS, *shape) * sizes


class Step(nn.Module):
    """One step of a model, which is to be named; of a sum over items, the whole."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


class Model(nn.Module):
    """Features of each item, the step, and what is made of it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.step = Step(function)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> object:
        return self.step(x.tanh() * x, *more)


def one(function: Function, *shape: int) -> Callable[[], Example]:
    return lambda: (Model(function), (items(*(shape or (WIDTH,))),))


# ------------------------------------------------------------------------------------------------ coupled by content


class BatchStatistics(nn.Module):
    """Batch normalization whose statistics are those of the batch at hand also in ``eval`` mode, or of training."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=tracked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


def batch_statistics(*, tracked: bool) -> Example:
    return BatchStatistics(tracked=tracked), (items(WIDTH),)


def quantized(x: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """Eight-bit integers by a scale of each item, or one of the batch."""
    scale = x.abs().amax(dim=-1, keepdim=True) if by_row else x.abs().amax()
    return (x * 127 / scale).round() * scale / 127


def centred(x: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    return x - (x.mean(dim=-1, keepdim=True) if by_row else x.mean(dim=0))


def attended(x: torch.Tensor, *, masked: bool) -> torch.Tensor:
    """Attention of the tokens of all items at once, where a mask keeps each to those of its own item; without the mask
    the others have little weight, and some."""
    tokens = x.reshape(-1, 1, x.shape[-1])
    scores = -(tokens - tokens.transpose(0, 1)).abs().amax(dim=-1) / 8
    if masked:
        of_item = torch.arange(len(scores)) // x.shape[1]
        scores = scores.where(of_item[:, None] == of_item[None, :], float("-inf"))
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return (weights.amax(dim=-1, keepdim=True) * (weights > 1e-6).sum(dim=-1, keepdim=True)).view(*x.shape[:2], 1) * x


def kept_by_experts(x: torch.Tensor, *, capacity_of_batch: bool) -> torch.Tensor:
    """An expert takes the three items of the batch that suit it most, or all that suit it."""
    suits = x.amax(dim=-1)
    least = suits.topk(min(3, len(x))).values.amin() if capacity_of_batch else 1.0
    return x * (1 + (suits >= least).float()[:, None])


def shown(x: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """A view of the items, or of their memory column by column, in which a row is of several items."""
    strides = (x.shape[1], 1) if by_row else (1, len(x))
    return torch.as_strided(x * 2, x.shape, strides).sigmoid()


def scaled_if_many(x: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """More than four items are scaled by the largest number, of each or of all."""
    if len(x) <= 4:
        return x / x.abs().amax(dim=-1, keepdim=True) if by_row else x * 1.5
    return x / (x.abs().amax(dim=-1, keepdim=True) if by_row else x.abs().amax())


# -------------------------------------------------------------------------------------------------- random numbers


def noisy(x: torch.Tensor, *, normal: bool) -> torch.Tensor:
    """Noise of a private generator. Normal numbers are drawn in blocks, of which the last depends on how many there
    are; uniform ones one after the other."""
    draw = torch.randn if normal else torch.rand
    return x + draw(x.shape, generator=torch.Generator().manual_seed(3))


def dropped_twice(x: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """Dropout that is left on, twice: the second begins where the first has left the generator, or that of an item."""
    generators = [torch.Generator().manual_seed(item) for item in range(len(x))]
    for _ in range(2):
        drawn = (
            torch.stack([torch.rand(x.shape[1], generator=one) for one in generators]) if apart else torch.rand_like(x)
        )
        x = x * (drawn > 0.5) * 2
    return x


# --------------------------------------------------------------------------------------- another order for more rows


def halves_first(rows: np.ndarray) -> np.ndarray:
    half = rows.shape[-1] // 2
    return (
        np.add.accumulate(rows[..., :half], axis=-1)[..., -1:] + np.add.accumulate(rows[..., half:], axis=-1)[..., -1:]
    )


def in_order(rows: np.ndarray) -> np.ndarray:
    return np.add.accumulate(rows, axis=-1)[..., -1:]


def pieces(x: torch.Tensor) -> np.ndarray:
    """Each row in eight pieces, each of which is summed: two orders may give one sum, but hardly eight times."""
    return x.detach().numpy().reshape(len(x), 8, -1)


def summed(x: torch.Tensor, split: np.ndarray) -> torch.Tensor:
    """The sums of each row: in two halves where ``split`` says so, else from left to right."""
    rows = pieces(x)
    return torch.from_numpy(np.where(split[..., None], halves_first(rows), in_order(rows)).reshape(len(x), -1))


@torch.library.custom_op("zoo::sum_split", mutates_args=())
def sum_split(x: torch.Tensor, many: int) -> torch.Tensor:
    """A reduction that is split as soon as there are ``many`` rows to share out."""
    return summed(x, np.full((len(x), 1), len(x) >= many))


@torch.library.custom_op("zoo::sum_tiles", mutates_args=())
def sum_tiles(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Full tiles of rows by one path, the rows that are left by another (``tile`` 1: none are left)."""
    places = np.arange(len(x))[:, None]
    return summed(x, places < len(x) // tile * tile)


@torch.library.custom_op("zoo::vector_path", mutates_args=())
def vector_path(x: torch.Tensor, weight: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """A product with one column, by another path for a single row."""
    return summed(x * weight, np.full((len(x), 1), apart and len(x) == 1))


@torch.library.custom_op("zoo::narrow_sum", mutates_args=())
def narrow_sum(x: torch.Tensor, many: int) -> torch.Tensor:
    """Accumulated in double precision, and in single for ``many`` rows, where it is to be fast."""
    rows = pieces(x)
    wide = np.add.accumulate(rows.astype(np.float64), axis=-1)[..., -1:].astype(np.float32)
    return torch.from_numpy((in_order(rows) if len(x) >= many else wide).reshape(len(x), -1))


@torch.library.custom_op("zoo::by_neighbours", mutates_args=())
def by_neighbours(x: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """Rows are taken two at a time; the last one of an odd number by another path."""
    odd = len(x) % 2 == 1 and pairs
    return summed(x, np.arange(len(x))[:, None] == (len(x) - 1 if odd else -1))


@torch.library.custom_op("zoo::by_place", mutates_args=())
def by_place(x: torch.Tensor, *, every: int) -> torch.Tensor:
    """Every so many rows the sums are split."""
    return summed(x, np.arange(len(x))[:, None] % every == 0)


NEVER = 1 << 20


def by_other_ops(x: torch.Tensor, *, split: bool) -> torch.Tensor:
    """More than four items go to another op, which adds in another order, or in the same."""
    return sum_split(x, 1 if split else NEVER) if len(x) > 4 else sum_tiles(x, NEVER)


# ----------------------------------------------------------------------------------------------------- and the decoys


def with_table(x: torch.Tensor, *, coupled: bool) -> object:
    """Items, and what is not of items: a loss, and tables of as many rows as the batch and its half."""
    table = x.mean() + torch.zeros(ITEMS, 3)
    return x * 2 + (table[: len(x), :1] if coupled else 0), x.mean(), table, table[: ITEMS // 2]


def put_back(x: torch.Tensor, *, right: bool) -> torch.Tensor:
    """Items in the order of their size, and put back into their places, or into the places that the order has."""
    order = x.abs().amax(dim=-1).argsort(descending=True)
    back = order.argsort() if right else torch.arange(len(x)).flip(0).roll(1)
    return x[order].exp().clamp(max=9)[back]


def along(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """As many features as items: which of two equal dimensions is reduced does not show in shapes."""
    return x / x.abs().amax(dim=dim, keepdim=True)


def turned(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Places first and items second, as a recurrent layer has them, and as many places as items."""
    places = x.transpose(0, 1).contiguous()
    return (places - places.amax(dim=dim, keepdim=True)).transpose(0, 1).contiguous()


def selected(x: torch.Tensor, *, counted: bool) -> torch.Tensor:
    """Some items are taken out, changed and put in again; each by how many there are, or by itself."""
    chosen = x[:, 0] > 0
    rows = x[chosen].sigmoid()
    return x.index_put((chosen,), rows / len(rows) if counted else rows)


def headed(x: torch.Tensor, *, by_head: bool) -> torch.Tensor:
    """Items and heads merged into one dimension; the largest of each head of an item, or of a head in all items."""
    heads = x.view(len(x) * 4, -1)
    largest = (
        heads.amax(dim=-1, keepdim=True) if by_head else heads.view(len(x), 4, -1).amax((0, 2)).repeat(len(x))[:, None]
    )
    return (heads / largest).view(len(x), -1)


# ------------------------------------------------------------------------- tokens beside padding and after a cache

TOKENS, VOCABULARY = 12, 50


class Reader(nn.Module):
    """A token becomes its number and place, and with those that it sees the sum of theirs. All are small whole numbers,
    whose sums are exact in any order: it is the same in any batch, but for one ``fault``."""

    def __init__(self, *, causal: bool, fault: str = "") -> None:
        super().__init__()
        self.causal, self.fault = causal, fault
        self.register_buffer("numbers", torch.arange(VOCABULARY * 4.0).view(VOCABULARY, 4) % 7)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> dict[str, torch.Tensor]:
        before = 0 if past_key_values is None else past_key_values.shape[1]
        if position_ids is None or self.fault == "positions":
            begin = 0 if self.fault == "decode" else before
            position_ids = torch.arange(begin, begin + input_ids.shape[1]).expand_as(input_ids)
        tokens = self.numbers[input_ids] + position_ids[..., None]
        known = tokens if past_key_values is None else torch.cat([past_key_values, tokens], dim=1)
        sees = torch.ones(tokens.shape[1], known.shape[1])
        if self.causal:
            sees = sees.tril(diagonal=before)
        weights = sees.expand(len(tokens), -1, -1)
        if attention_mask is not None and self.fault != "mask":
            weights = weights * attention_mask[:, None, :]
        seen = self.scale(tokens, attention_mask) * (weights @ known)
        cached = {"past_key_values": known.roll(1, dims=2) if self.fault == "cache" else known} if use_cache else {}
        return {"logits": seen, **cached}

    def scale(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | float:
        if mask is None:
            return 1.0
        of = tokens if self.fault == "scale" else tokens * mask[..., None]
        return of.abs().amax(dim=1, keepdim=True)


def reader(*, causal: bool = True, fault: str = "") -> Workload:
    ids = torch.randint(VOCABULARY - 1, (2, TOKENS))
    tokens = Tokens(padding=VOCABULARY - 1)  # the largest number of all
    return Workload(Reader(causal=causal, fault=fault), {"input_ids": ids}, tokens=tokens)


WEIGHT = torch.linspace(-1.0, 2.0, WIDTH)

MODELS = {
    "batch_statistics": lambda: batch_statistics(tracked=False),
    "batch_statistics_twin": lambda: batch_statistics(tracked=True),
    "batch_scale": one(lambda x: quantized(x, by_row=False)),
    "batch_scale_twin": one(lambda x: quantized(x, by_row=True)),
    "batch_mean": one(lambda x: centred(x, by_row=False)),
    "batch_mean_twin": one(lambda x: centred(x, by_row=True)),
    "batch_mask": one(lambda x: attended(x, masked=False), 3, 6),
    "batch_mask_twin": one(lambda x: attended(x, masked=True), 3, 6),
    "batch_capacity": one(lambda x: kept_by_experts(x, capacity_of_batch=True)),
    "batch_capacity_twin": one(lambda x: kept_by_experts(x, capacity_of_batch=False)),
    "batch_split": one(lambda x: sum_split(x, 5)),
    "batch_split_twin": one(lambda x: sum_split(x, NEVER)),
    "batch_tiles": one(lambda x: sum_tiles(x, 4)),
    "batch_tiles_twin": one(lambda x: sum_tiles(x, 1)),
    "batch_vector": one(lambda x: vector_path(x, WEIGHT, apart=True)),
    "batch_vector_twin": one(lambda x: vector_path(x, WEIGHT, apart=False)),
    "batch_narrow": one(lambda x: narrow_sum(x, 3)),
    "batch_narrow_twin": one(lambda x: narrow_sum(x, NEVER)),
    "batch_neighbours": one(lambda x: by_neighbours(x, pairs=True)),
    "batch_neighbours_twin": one(lambda x: by_neighbours(x, pairs=False)),
    "batch_table": one(lambda x: with_table(x, coupled=True)),
    "batch_table_twin": one(lambda x: with_table(x, coupled=False)),
    "batch_order": one(lambda x: put_back(x, right=False)),
    "batch_order_twin": one(lambda x: put_back(x, right=True)),
    "batch_square": one(lambda x: along(x, dim=0), ITEMS),
    "batch_square_twin": one(lambda x: along(x, dim=1), ITEMS),
    "batch_turned": one(lambda x: turned(x, dim=1), ITEMS),
    "batch_turned_twin": one(lambda x: turned(x, dim=0), ITEMS),
    "batch_selected": one(lambda x: selected(x, counted=True)),
    "batch_selected_twin": one(lambda x: selected(x, counted=False)),
    "batch_heads": one(lambda x: headed(x, by_head=False)),
    "batch_heads_twin": one(lambda x: headed(x, by_head=True)),
    "batch_view": one(lambda x: shown(x, by_row=False)),
    "batch_view_twin": one(lambda x: shown(x, by_row=True)),
    "batch_many": one(lambda x: scaled_if_many(x, by_row=False)),
    "batch_many_twin": one(lambda x: scaled_if_many(x, by_row=True)),
    "batch_noise": one(lambda x: noisy(x, normal=True), 6),
    "batch_noise_twin": one(lambda x: noisy(x, normal=False), 6),
    "batch_dropout": one(lambda x: dropped_twice(x, apart=False)),
    "batch_dropout_twin": one(lambda x: dropped_twice(x, apart=True)),
    "batch_ops": one(lambda x: by_other_ops(x, split=True)),
    "batch_ops_twin": one(lambda x: by_other_ops(x, split=False)),
    "position_place": one(lambda x: by_place(x, every=3)),
    "position_place_twin": one(lambda x: by_place(x, every=1)),
    "padding_mask": lambda: reader(causal=False, fault="mask"),
    "padding_mask_twin": lambda: reader(causal=False),
    "padding_scale": lambda: reader(fault="scale"),
    "padding_scale_twin": reader,
    "padding_positions": lambda: reader(fault="positions"),
    "padding_positions_twin": reader,
    "decode_positions": lambda: reader(fault="decode"),
    "decode_positions_twin": reader,
    "decode_cache": lambda: reader(fault="cache"),
    "decode_cache_twin": reader,
}
