"""Which ranks must hold the same content as this one, for a tensor: by the placements of a ``DTensor``, by DDP, or by
the convention of ``parallelize_module``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hashbench.core.records import BESIDE_DTENSORS
from hashbench.core.trace.groups import RankGroups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

DDP = "DDP"
"""Placement of a parameter that ``DistributedDataParallel`` keeps equal in its group."""


class Placement(NamedTuple):
    """How a tensor lies on the ranks; see :class:`~hashbench.core.records.Result`."""

    placement: str = ""
    replicas: tuple[int, ...] = ()


NOT_PLACED = Placement()


class Placements:
    """Placements of the tensors of one trace.

    Args:
        groups: process groups of the trace.
        modules: return the living modules that the trace has met.
        moment: return a number that grows while the program goes on. DDP's parameters are looked up again then.
    """

    def __init__(
        self, groups: RankGroups, modules: Callable[[], Iterable[torch.nn.Module]], moment: Callable[[], int]
    ) -> None:
        self._groups, self._modules, self._moment = groups, modules, moment
        self._meshes: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[bool, ...], tuple[int, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self._seen_at = -1
        self._replicated: dict[int, tuple[weakref.ref[torch.Tensor], Placement]] = {}

    def of(self, value: Any) -> Placement:
        """Return the placement of a tensor on the ranks, and the global ranks that must hold the same content as this
        one; of a partly replicated one those along the replicated dimensions. Call it untraced."""
        if type(value) is torch.Tensor or not torch.distributed.is_available():
            return NOT_PLACED
        placements = getattr(value, "placements", None)
        if placements is not None and hasattr(value, "device_mesh"):
            shared = tuple([placement.is_replicate() for placement in placements])
            return Placement(str(tuple(placements)), self._along(value.device_mesh, shared))
        if self._seen_at != self._moment():
            self._seen_at = self._moment()
            self._replicated = {**dict(self._beside_dtensors()), **dict(self._ddp_parameters())}
        known = self._replicated.get(id(value))
        return known[1] if known is not None and known[0]() is value else NOT_PLACED

    def _along(self, mesh: DeviceMesh, shared: tuple[bool, ...]) -> tuple[int, ...]:
        found = self._meshes.setdefault(mesh, {})
        if shared not in found:
            found[shared] = ranks_along(mesh.mesh.tolist(), mesh.get_coordinate(), shared)
        return found[shared]

    def _ddp_parameters(self) -> Iterable[tuple[int, tuple[weakref.ref[torch.Tensor], Placement]]]:
        from torch.nn.parallel import DistributedDataParallel

        for module in self._modules():
            if isinstance(module, DistributedDataParallel):
                placement = Placement(DDP, self._groups.of([module.process_group]).ranks)
                if len(placement.replicas) > 1:
                    for parameter in equal_parameters(module):
                        yield id(parameter), (weakref.ref(parameter), placement)

    def _beside_dtensors(self) -> Iterable[tuple[int, tuple[weakref.ref[torch.Tensor], Placement]]]:
        """Yield the plain parameters of outermost modules that have ``DTensor`` parameters of one mesh as well:
        ``parallelize_module`` leaves alone what all ranks of the mesh compute alike."""
        modules = list(self._modules())
        if not any(_is_dtensor(parameter) for module in modules for parameter in module._parameters.values()):
            return
        inner = {id(child) for module in modules for child in module.children()}
        for module in modules:
            parameters: list[Any] = [] if id(module) in inner else list(module.parameters())
            meshes = [parameter.device_mesh for parameter in parameters if _is_dtensor(parameter)]
            ranks = {self._along(mesh, (True,) * mesh.ndim) for mesh in meshes}
            if len(ranks) != 1 or not (kept := ranks.pop()):
                continue
            placement = Placement(BESIDE_DTENSORS, kept)
            yield from (
                (id(parameter), (weakref.ref(parameter), placement))
                for parameter in parameters
                if not _is_dtensor(parameter)
            )


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def ranks_along(mesh: Any, coordinate: Iterable[int] | None, shared: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the ranks of a mesh (nested lists) at this coordinate, and any along the ``shared`` dimensions.

    Empty if that is one rank, or if this rank is not in the mesh.

    >>> ranks_along([[0, 1], [2, 3]], (1, 0), (True, False))
    (0, 2)
    """
    if coordinate is None:
        return ()
    here = list(coordinate)
    sizes, level = [], mesh
    while isinstance(level, list):
        sizes.append(len(level))
        level = level[0]
    places = itertools.product(
        *(range(size) if every else [at] for size, every, at in zip(sizes, shared, here, strict=True))
    )
    ranks = [_at(mesh, place) for place in places]
    return tuple(ranks) if len(ranks) > 1 else ()


def _at(mesh: Any, place: Iterable[int]) -> int:
    for at in place:
        mesh = mesh[at]
    return int(mesh)


def equal_parameters(module: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters that DDP keeps equal on all ranks of its group."""
    late = {id(parameter) for parameter in getattr(module, "_delay_all_reduce_params", ())}
    return [
        parameter
        for name, parameter in module.module.named_parameters()
        if name not in module.parameters_to_ignore or id(parameter) in late
    ]
