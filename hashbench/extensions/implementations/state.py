"""The weights of models in memory: mappings of names to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations.digest import TensorHeader
from hashbench.extensions.implementations.dtypes import SIZES, Bits, unsigned

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class State:
    """Tensors in memory; a :class:`~.digest.TensorSource`."""

    headers: dict[str, TensorHeader]
    tensors: Mapping[str, torch.Tensor]

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Return the elements from ``start`` to ``stop`` of a tensor."""
        kind = unsigned(self.headers[name].dtype)
        part = self.tensors[name].detach().reshape(-1)[start:stop].cpu().contiguous()
        return part.view(_SIGNED[kind.itemsize]).numpy().view(kind)


def state_of(held: torch.nn.Module | Mapping[str, torch.Tensor], side: str) -> State:
    """Return the tensors of a module, or of a mapping of names to tensors such as ``state_dict()``.

    Raises:
        HashbenchError: one of them has no elements here that could be read.
    """
    tensors = held.state_dict() if isinstance(held, torch.nn.Module) else held
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in found.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_meta or _name(tensor) not in SIZES:
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} of {tensor.dtype}"
            raise HashbenchError(
                f"cannot compare the weights of {side}",
                consequence=f"{name} is {kind}, whose elements are not read, so nothing was compared",
                tip="Pass a mapping of names to plain tensors.",
            )
    if not found:
        raise HashbenchError(
            f"cannot compare the weights of {side}", consequence="it has none", tip="Pass a module, or a state dict."
        )
    return State({name: TensorHeader(tuple(tensor.shape), _name(tensor)) for name, tensor in found.items()}, found)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
