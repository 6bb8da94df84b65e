"""Compute in float64 what a program computes in lower dtypes, so that equal functions give equal values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.op_schema import plan_of

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""Dtypes that are replaced. Those of 8 bits and less are quantized on purpose and stay."""

_NARROWER = ({torch.float64: torch.float32, torch.complex128: torch.complex64}, {torch.float64: torch.bfloat16})
"""Dtypes that an op without a float64 kernel is tried in."""


class WideMode(TorchDispatchMode):
    """Replace low dtypes of tensors and ``dtype`` arguments by float64.

    Enter it behind a trace: the trace then records the replaced calls. Gradients flow as in float64, except into leaves
    of a low dtype.

    Attributes:
        fallbacks: number of calls of each op that has no float64 kernel and was computed in a lower dtype.
        falls_back: true during such a call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fallbacks: Counter[str] = Counter()
        self.falls_back = False
        self._widened: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the op in float64; in a lower dtype where that fails and another one does not."""
        given = kwargs or {}
        with untraced():
            args, wide = mapped(tuple(args), self._wide), mapped(dict(given), self._wide)
        try:
            return func(*args, **wide)
        except (RuntimeError, NotImplementedError):
            if plan_of(func).writes_arguments:
                raise
            for narrower in _NARROWER:
                output = self._narrow(func, args, wide, narrower)
                if output is not None:
                    self.fallbacks[str(func)] += 1
                    return output
            raise

    def _wide(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return WIDER.get(leaf, leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in WIDER:
            return leaf
        try:
            storage, offset, stride = leaf.untyped_storage(), leaf.storage_offset(), leaf.stride()
        except (NotImplementedError, RuntimeError):
            return leaf.to(WIDER[leaf.dtype])
        if leaf.is_meta or not leaf.numel():
            return leaf.to(WIDER[leaf.dtype])
        key = (int(storage._cdata), leaf.dtype)
        if key not in self._widened:  # writes to one view of it are then seen by others
            whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            whole.set_(storage, 0, (storage.nbytes() // leaf.itemsize,), (1,))
            self._widened[key] = (leaf, whole.to(WIDER[leaf.dtype]))
        return self._widened[key][1].as_strided(leaf.shape, stride, offset)

    def _narrow(self, func: Any, args: Any, kwargs: Any, narrower: Mapping[torch.dtype, torch.dtype]) -> Any:
        def narrow(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return narrower.get(leaf, leaf)
            if isinstance(leaf, torch.Tensor) and leaf.dtype in narrower:
                return leaf.to(narrower[leaf.dtype])
            return leaf

        if not any(tensor.dtype in narrower for tensor in tensors_in([args, kwargs])):
            return None
        self.falls_back = True
        try:
            return mapped(func(*mapped(args, narrow), **mapped(kwargs, narrow)), self._wide_result)
        except (RuntimeError, NotImplementedError):
            return None
        finally:
            self.falls_back = False

    def _wide_result(self, leaf: Any) -> Any:
        return leaf.to(WIDER[leaf.dtype]) if isinstance(leaf, torch.Tensor) and leaf.dtype in WIDER else leaf


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype torch's default inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
