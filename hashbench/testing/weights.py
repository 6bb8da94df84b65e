"""The check of weights. torch is imported by the first call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hashbench.testing.options import CheckFailedError

if TYPE_CHECKING:
    import torch


def assert_same_weights(
    a: torch.nn.Module | Mapping[str, torch.Tensor], b: torch.nn.Module | Mapping[str, torch.Tensor]
) -> None:
    """Fail where two models do not hold the same weights, whatever these are called.

    Parts may be fused, cut, transposed, permuted, cast or padded; what differs is named (``docs/weights.md``).

    Args:
        a, b: modules, or tensors by name such as ``state_dict()``. They are not changed.

    Raises:
        CheckFailedError: something differs, or could not be compared.
    """
    __tracebackhide__ = True
    from hashbench.core.errors import HashbenchError
    from hashbench.extensions.implementations.finding import finding_of
    from hashbench.extensions.implementations.weights import compare_models

    try:
        finding = finding_of(compare_models(a, b))
    except HashbenchError as error:
        raise CheckFailedError(str(error)) from None
    if not finding.equal:
        raise CheckFailedError(str(finding), finding)
