"""Do two checkpoints, or two models in memory, hold the same weights? The functions that others call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.core.finding import Finding
from hashbench.extensions.implementations.checkpoint import open_checkpoint
from hashbench.extensions.implementations.compare import compare_weights
from hashbench.extensions.implementations.finding import LINES, finding_of
from hashbench.extensions.implementations.verdict import WeightsVerdict

if TYPE_CHECKING:
    import torch


def compare_checkpoints(a: Path, b: Path, *, limit: int = LINES) -> Finding:
    """Return the report of two checkpoints: each a ``.safetensors`` file, or a folder of them.

    Args:
        a, b: paths.
        limit: lines of the table, at most.

    Raises:
        HashbenchError: one of them cannot be read, or is a pickle.
    """
    verdict = compare_weights(open_checkpoint(a), open_checkpoint(b))
    return finding_of(verdict, names=(str(a), str(b)), limit=limit)


def compare_models(
    a: torch.nn.Module | Mapping[str, torch.Tensor], b: torch.nn.Module | Mapping[str, torch.Tensor]
) -> WeightsVerdict:
    """Return what two models in memory hold.

    Args:
        a, b: modules, or tensors by name such as ``state_dict()``; of any dtype and on any device, not changed.

    Raises:
        HashbenchError: a tensor has no elements that can be read, as one on the meta device.
    """
    from hashbench.extensions.implementations.state import state_of  # imports torch

    return compare_weights(state_of(a, "a"), state_of(b, "b"))
