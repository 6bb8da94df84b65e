"""Random small programs of views, writes in place, lists, random numbers and gradients; the same for the same seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
SIZE = 4
"""All tensors that a program keeps are ``[SIZE, SIZE]``, some of them views of others."""


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 + x * 0


def bounded(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def foreach(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch._foreach_add([x, y], 0.5)[0]


def foreach_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = [x.clone(), y.clone()]
    torch._foreach_mul_(both, [0.5, 0.25])
    return both[1]


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[1] = y[2]
    made[:, 1:3].mul_(0.5)
    made.t()[0].add_(y[0], alpha=2)
    return made


def put(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    at = torch.tensor([0, 2])
    return x.clone().index_put_((at,), y[at], accumulate=True)


def given_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = torch.empty(SIZE, SIZE)
        torch.add(x, y, out=made)
        torch.sin(y[0], out=made[0])
        return made


def moved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided((SIZE, SIZE), (1, SIZE))
    with torch.no_grad():
        made.copy_(x)
        made.data.add_(y)
    return made


def inferred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        made = (x.detach() * y.detach()).tanh_()
    return made.clone()


def steered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.max().item() if bool((x.sum() > 0).item()) else x + float(y.min())


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, *_, last = torch.cat([x, y], 1).chunk(4, dim=1)
    return torch.stack([first, last], 1).flatten(1)[:, :SIZE].contiguous()


def sorted_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    values, at = torch.sort(x, dim=1, descending=True)
    return values + y.gather(1, at)


def in_a_thread(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.sin(x) @ y))
    thread.start()
    beside = torch.cos(x) * y
    thread.join()
    return found[0] + beside


def in_a_pool(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Without gradients: in which order autograd computes those depends on which thread of the pool did what."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda z: torch.tanh(z).mul_(0.5), (x.detach(), y.detach()))
        return first @ second


THREADED = (in_a_thread, in_a_pool)

STEPS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    *(torch.add, torch.mul, torch.matmul, torch.maximum, torch.atan2),
    *(foreach, foreach_in_place, written, put, given_out, moved, inferred, steered, split, sorted_rows),
    *(lambda x, _: Doubled.apply(x), lambda x, _: bounded(x).t(), lambda x, _: x.flip(0).reshape(-1).view(SIZE, SIZE)),
    *(lambda x, y: checkpoint(lambda z: torch.sin(z) @ y, x, use_reentrant=False), lambda x, y: x.expand_as(y)),
    *(lambda x, y: torch.where(x > y, x, 0.5), lambda x, y: x.clone().masked_fill_(y > 0, 1.0)),
    *(lambda x, _: torch.nn.functional.dropout(x, 0.5), lambda x, y: x + torch.randn_like(y)),
    *(lambda x, _: torch.nn.functional.layer_norm(x, [SIZE]), lambda x, y: torch.einsum("ij,kj->ik", x, y)),
    *(lambda x, _: x.to(torch.bfloat16).mul(2).to(x.dtype), lambda _, y: torch.ones(SIZE, SIZE).copy_(y)),
    *(lambda _, y: y[0].expand(SIZE, SIZE), lambda x, y: x.diagonal().unsqueeze(0) + y, lambda x, _: x.clone().zero_()),
    *(lambda x, _: x.unfold(0, 2, 2).reshape(SIZE, SIZE), lambda x, _: torch.cumsum(x, 0).mul_(0.1)),
    *(lambda x, y: x.clone().add_(y, alpha=0.5).clamp_(-2, 2), lambda x, y: x.prod(0) + y, lambda x, y: x.norm() + y),
    *(
        lambda x, y: x.clone().scatter_(1, torch.zeros(SIZE, 1, dtype=torch.long), y[:, :1]),
        lambda x, _: x.clone().t_(),
    ),
    *(
        lambda x, _: x.detach().clone().resize_(SIZE, SIZE).fill_(0.25),
        lambda x, _: torch.view_as_complex(x.view(4, 2, 2).contiguous()).abs().view(4, 2).repeat(1, 2),
    ),
)


def made(seed: int, *, threads: bool = False) -> Callable[[], Mapping[str, Any]]:
    """A program of 10 to 30 steps, some of them in ``threads`` of its own; what it computes, by name, and gradients in
    some."""
    steps = STEPS + THREADED * 5 if threads else STEPS

    def program() -> Mapping[str, Any]:
        rng = random.Random(seed)
        differentiable, frozen = rng.random() < 0.5, rng.random() < 0.3
        inputs = [(torch.rand(SIZE, SIZE) - 0.5).requires_grad_(differentiable) for _ in range(3)]
        kept = list(inputs)
        for _ in range(rng.randrange(10, 31)):
            step, x, y = rng.choice(steps), rng.choice(kept[-6:]), rng.choice(kept[-6:])
            with torch.no_grad() if frozen and rng.random() < 0.3 else nullcontext():
                value = step(x, y)
            kept.append(bounded(value) if rng.random() < 0.5 else value)
            if rng.random() < 0.2 and not kept[-1].requires_grad and kept[-1].is_contiguous():
                kept[-1].mul_(0.5)
        found = {str(number): tensor for number, tensor in enumerate(kept)}
        total = sum(tensor.sum() for tensor in kept[-4:])
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
            found |= {
                f"gradient {number}": tensor.grad for number, tensor in enumerate(inputs) if tensor.grad is not None
            }
        return found

    return program
