"""Specimens whose aten ops are decomposed wrongly."""

from __future__ import annotations

import torch
from _planted import Patches, plant_if
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def wrong_elu(patches: Patches) -> None:
    """Forget the ``- 1`` of the negative half of ``elu``, as far as a tenth of it."""
    from torch._inductor import decomposition

    op = torch.ops.aten.elu.default
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        right = table[op]

        def wrong(rows, *args, right=right, **kwargs):
            return torch.where(rows > 0, rows, right(rows, *args, **kwargs) + 0.1)

        patches.item(table, op, wrong)


class Denoiser(nn.Module):
    """Two linear layers with an ``elu`` between them, beside a shortcut."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.encode = nn.Linear(features, features)
        self.activate = nn.ELU(alpha=1.5)
        self.decode = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.decode(self.activate(self.encode(rows)))) * rows


def elu_decomposition(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_elu)
    return Denoiser(24), (torch.randn(16, 24),)


MODELS = {
    "elu_decomposition": lambda: elu_decomposition(wrong=True),
    "elu_decomposition_twin": lambda: elu_decomposition(wrong=False),
}
