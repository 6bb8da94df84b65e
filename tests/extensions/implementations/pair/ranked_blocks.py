"""A transformer block in one process, and by hand or by DTensor on several ranks, with mistakes that are planted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

HEADS, WIDTH, HIDDEN, BATCH, TOKENS = 4, 32, 64, 4, 7


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a residual."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Rows(nn.Module):
    """A row-parallel linear layer: partial sums, a reduction, the bias."""

    def __init__(self, whole: nn.Linear, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.weight, self.bias = nn.Parameter(shard(whole.weight, 1)), whole.bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.mistake == "bias on every rank":
            y = functional.linear(x, self.weight, self.bias)  # planted: bias
            dist.all_reduce(y)
            return residual + y
        y = functional.linear(x, self.weight)
        if self.mistake == "residual on every rank":
            y = y + residual  # planted: residual
        if self.mistake == "no reduction":
            return residual + y  # planted: reduction
        dist.all_reduce(y)
        if self.mistake == "residual on every rank":
            return y
        return residual + (y if self.bias is None else y + self.bias)


def shard(whole: torch.Tensor, dim: int, *, rank: int | None = None) -> torch.Tensor:
    """Return the shard of this rank."""
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank].clone()


def columns(whole: nn.Linear, *, stale: bool = False) -> nn.Linear:
    """Return the shard of a column-parallel linear layer."""
    part = nn.Linear(whole.in_features, whole.out_features // dist.get_world_size())
    rank = 0 if stale else None
    part.weight.data, part.bias.data = shard(whole.weight, 0, rank=rank), shard(whole.bias, 0, rank=rank)
    return part


class Sharded(nn.Module):
    """The block on several ranks, with a mistake or none."""

    def __init__(self, whole: Block, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        self.q, self.k, self.v = columns(whole.q), columns(whole.k), columns(whole.v)
        self.o, self.down = Rows(whole.o, ""), Rows(whole.down, mistake)
        self.up = columns(whole.up, stale=mistake == "shard twice")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (self.heads(p(y)) for p in (self.q, self.k, self.v))
        if self.mistake == "heads swapped":
            k = k.flip(1)  # planted: heads
        weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, -1)
        x = self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1), x)
        y = self.up(self.norm2(x))  # planted: shard
        if self.mistake == "only rank 0 logs" and dist.get_rank() == 0:
            print(float(y.square().mean()))
        return self.down(functional.gelu(y), x)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


def one(*, bias: bool = True) -> nn.Module:
    return Block(bias=bias)


def sharded(mistake: str = "", *, bias: bool = True) -> nn.Module:
    if mistake == "dies" and dist.get_rank() == 1:
        raise ValueError("no shard for this rank")
    return Sharded(Block(bias=bias), mistake)


def down() -> nn.Linear:
    return nn.Linear(WIDTH, HIDDEN, bias=False)


def rows(*, reduced: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = shard(down().weight, 1)

    def product(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight.to(x).T
        if reduced:
            dist.all_reduce(y)
        return y

    return product


def own_columns() -> tuple[torch.Tensor]:
    return (shard(*inputs(), -1),)


def by_dtensor() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(("o", "down"), RowwiseParallel())
    return parallelize_module(Block(), mesh, plan)


def inputs() -> tuple[torch.Tensor]:
    return (torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)),)


def own_items() -> tuple[torch.Tensor]:
    return (shard(*inputs(), 0),)


def squares(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def never_ends(x: torch.Tensor) -> torch.Tensor:
    """Reduce on rank 0 alone."""
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.barrier()
        dist.barrier()
    return x


def make_never_ending() -> object:
    return never_ends
