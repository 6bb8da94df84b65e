"""``Workload``: a model with everything that a run of it needs; calling it, its inputs, and default losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.run.leaves import tensors_of
from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.core.trace.digest import unobserved, untraced


@dataclass(frozen=True, slots=True)
class Tokens:
    """By which arguments a model is given tokens, padding and a cache, as ``--invariance`` asks for.

    The names are those of transformers. Inputs with two first dimensions like those of ``ids`` are cut and padded with
    it.

    Args:
        ids: the token ids, ``(batch, tokens)``.
        mask: 1 for each token, 0 for padding, ``(batch, tokens)``; empty where the model takes none.
        positions: the positions of the tokens, ``(batch, tokens)``; empty where the model takes none, and ``None``
            where it needs none: it makes them from the mask, or what a token becomes does not depend on the place at
            which its sequence begins.
        padding: the id of the padding.
        decoded: the token ids that a cache is kept of.
        cache: what came before, as the output of an earlier call has it under this name; empty where there is no cache.
        use_cache: the argument that asks for such an output; empty where there is none.
    """

    ids: str = "input_ids"
    mask: str = "attention_mask"
    positions: str | None = "position_ids"
    padding: int = 0
    decoded: str = "input_ids"
    cache: str = "past_key_values"
    use_cache: str = "use_cache"


CACHES = ("past_key_values", "cache", "cache_params", "state")
"""Names of the cache in ``transformers``, as argument and output: ``cache`` since 5.24, for all models."""


def cache_among(parameters: Container[str]) -> str:
    """Return the name of the cache among the ``parameters`` of a function; empty if there is none."""
    return next((name for name in CACHES if name in parameters), "")


@dataclass(frozen=True, slots=True)
class Workload:
    """Return value of a zoo function when ``(module, example_inputs)`` is not enough.

    Only ``module`` and one of ``inputs`` and ``make_inputs`` are required; the others have defaults.

    Args:
        module: the model, on the CPU or already on its device. Deep-copied for every run and never run itself.
        inputs: a tuple or list (positional arguments), a mapping (keyword arguments) or one tensor. Cloned for every
            run.
        make_inputs: called without arguments for every run, after seeding, instead of ``inputs``.
        make_optimizer: called with the parameters of the copy that require gradients; returns the optimizer of that
            run. Training only. Default: Adam with ``lr=0.01``, as in ``benchmarks/dynamo``.
        loss: called with the model's output; returns a scalar tensor with a gradient. Default: the average of the means
            of all floating-point tensors in the output (``reduce_to_scalar_loss`` of dynamo), or a fixed random
            projection with ``--cotangent random``.
        iterations: number of steps per run. Default: ``--iterations``, else 2.
        world_size: number of ranks, each in a process of its own, that run the model together (``torch.distributed``).
            Every rank calls the zoo function for each of its runs, with a process group that is up. A function that
            needs the group says ``@hashbench.model(world_size=2)``, too. Default: 1, without a group.
        tokens: how its sequences are given padding and a cache. Default: by the arguments of its ``forward`` that are
            called as :class:`Tokens` calls them.
    """

    module: torch.nn.Module
    inputs: Any = None
    make_inputs: Callable[[], Any] | None = None
    make_optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    iterations: int | None = None
    tokens: Tokens | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.world_size is not None and (type(self.world_size) is not int or self.world_size < 1):
            raise ValueError(f"world_size must be an int >= 1, got {self.world_size!r}")
        if self.inputs is None and self.make_inputs is None:
            raise ValueError(
                "a Workload needs inputs or make_inputs: the model cannot be called. "
                "Pass inputs=(tensor,) or make_inputs=function."
            )


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """Call ``model`` with example inputs: positional for a list or tuple, by name for a mapping, else the one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def clone_inputs(inputs: Any) -> Any:
    """Copy example inputs: tensors are cloned with their strides and ``requires_grad``, containers are rebuilt."""
    return map_tensors(inputs, cloned)


def cloned(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor, in a dtype if one is given, with its strides and what lies between its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dtype = dtype or plain.dtype
    if _has_memory(plain):
        memory = plain.as_strided((_elements_of(plain),), (1,))  # overlapping ones cannot be copied element by element
        copied = memory.to(dtype, copy=True).as_strided(plain.shape, plain.stride(), 0)
    else:
        copied = plain.clone() if dtype == plain.dtype else plain.to(dtype)
    return copied.requires_grad_(tensor.requires_grad)


def _has_memory(plain: torch.Tensor) -> bool:
    dense = plain.layout is torch.strided and not plain.is_quantized and not plain.is_nested and plain.numel() > 0
    return dense and type(plain) in (torch.Tensor, torch.nn.Parameter)


def _elements_of(plain: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor's, with those between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy nested containers, mapping their tensors; other leaves are deep-copied."""
    return mapped(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf))


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Copy nested inputs, floating-point tensors in a dtype; these are leaves that require a gradient as before.

    Strides and gaps stay: ``as_strided`` reads what lies between the elements.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return cloned(tensor, dtype) if tensor.is_floating_point() else tensor

    return map_tensors(inputs, cast)


def cast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast floating-point parameters and buffers of a module, which it returns; strides and gaps stay."""
    named = [*module.named_parameters(), *module.named_buffers()]
    apart = {name: tensor.detach() for name, tensor in named if _has_gaps_or_overlap(tensor)}
    module.to(dtype)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in apart and tensor.is_floating_point():
            tensor.data = cloned(apart[name], dtype)
    return module


def _has_gaps_or_overlap(tensor: torch.Tensor) -> bool:
    return _has_memory(tensor) and _elements_of(tensor) != tensor.numel()


def mean_of_outputs(output: Any) -> torch.Tensor:
    """Compute the average of the means of all floating-point or complex tensors with a gradient in the output."""
    means = [_real(tensor).mean() for tensor in _differentiable(output)]
    return torch.stack(means).mean() if len(means) > 1 else means[0]


def random_projection(output: Any, *, seed: int) -> torch.Tensor:
    """Sum, over all tensors of the output, the dot product with fixed standard normal numbers divided by the size."""
    total: torch.Tensor | None = None
    for index, tensor in enumerate(_differentiable(output)):
        real = _real(tensor)
        with untraced():
            generator = torch.Generator().manual_seed(seed + index)
            direction = torch.randn(real.shape, generator=generator).to(real.device, real.dtype)
        term = (real * direction).sum() / max(1, real.numel())
        total = term if total is None else total + term
    if total is None:
        raise _no_gradient()
    return total


def _differentiable(output: Any) -> list[torch.Tensor]:
    with unobserved():
        tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not tensors:
        raise _no_gradient()
    return tensors


def _no_gradient() -> RuntimeError:
    return RuntimeError(
        "no output of the model has a gradient, so there is nothing to train. "
        "Use --inference or give the Workload a loss."
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def batch_of(inputs: Any, stated: int | None) -> int | None:
    """Return the batch size of example inputs: ``stated``, else the first dimension of all tensors that have one;
    ``None`` if these differ or there are none."""
    if stated is not None:
        return stated
    first = {tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()}
    return first.pop() if len(first) == 1 else None
