"""Compute in float64 what a program computes in lower dtypes, so that equal functions give equal values."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.divergence.content import COARSE, EXACT, FALLBACK
from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.core.trace.digest import dtype_name, is_distributed, untraced
from hashbench.core.trace.op_schema import plan_of

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""Dtypes that are replaced. Those of 8 bits and less are quantized on purpose and stay."""

_NARROWER = (
    {torch.float64: torch.float32, torch.complex128: torch.complex64},
    {torch.float64: torch.bfloat16},
    {torch.float64: torch.float16},
)
"""Dtypes that an op without a float64 kernel is tried in."""

_TOLERANCE = {torch.float32: FALLBACK, torch.complex64: FALLBACK}
_COMPILED_IN = ("aten", "prims", "prim")


class WideMode(TorchDispatchMode):
    """Replace low dtypes of tensors and ``dtype`` arguments by float64.

    Enter it behind a trace: the trace then records the replaced calls. Gradients flow as in float64, except into leaves
    of a low dtype. An op of another library that rounds what it reads to a lower dtype is found by moving its
    arguments by less than that dtype resolves; for this it is called up to four times more, on copies.

    Attributes:
        fallbacks: number of calls of each op that was computed in a lower dtype: it has no float64 kernel, or casts
            inside. ``in bfloat16`` follows the name if it was lower than float32.
        tolerance: that of what is computed now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fallbacks: Counter[str] = Counter()
        self.tolerance = EXACT
        self._own = torch.get_default_dtype()
        self._failed: tuple[BaseException | None, str] = (None, "")
        self._widened: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the op in float64; in a lower dtype where that fails and another one does not."""
        if any(map(is_distributed, types)):
            return NotImplemented  # the class then dispatches ops on local tensors
        with untraced():
            args, wide = mapped(tuple(args), self._wide), mapped(dict(kwargs or {}), self._wide)
            once = _is_collective(func)  # the same number of times on every rank
            inside = None if once else _rounded_inside(func, args, wide)
        try:
            with self._lower(inside):
                output = func(*args, **wide)
        except Exception as error:
            for narrower in () if once else _NARROWER:
                called, output = self._narrow(func, args, wide, narrower)
                if called:
                    self._count(func, narrower[torch.float64])
                    return output
            self._failed = error, str(func)
            raise
        low = next((tensor.dtype for tensor in tensors_in(output) if tensor.dtype in WIDER), inside)
        if low is None:
            return output
        self._count(func, low)
        with self._lower(low):
            return mapped(output, widened)

    def failed_op(self, error: BaseException) -> str:
        """Return the op that raised this error; empty if none did."""
        return self._failed[1] if self._failed[0] is error else ""

    def _count(self, func: Any, low: torch.dtype) -> None:
        self.fallbacks[str(func) if low in _TOLERANCE else f"{func} in {dtype_name(low)}"] += 1

    @contextmanager
    def _lower(self, low: torch.dtype | None) -> Iterator[None]:
        self.tolerance = EXACT if low is None else tolerance_of(low)
        try:
            yield
        finally:
            self.tolerance = EXACT

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

    def _narrow(
        self, func: Any, args: Any, kwargs: Any, narrower: Mapping[torch.dtype, torch.dtype]
    ) -> tuple[bool, Any]:
        """Call an op in a lower dtype, and return whether it did not raise, with its output in float64."""
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def narrow(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return narrower.get(leaf, leaf)
            if not isinstance(leaf, torch.Tensor) or leaf.dtype not in narrower:
                return leaf
            if id(leaf) not in given:
                given[id(leaf)] = leaf, leaf.to(narrower[leaf.dtype])
            return given[id(leaf)][1]

        if not any(tensor.dtype in narrower for tensor in tensors_in([args, kwargs])):
            return False, None
        with self._lower(narrower[torch.float64]):
            low_args, low_kwargs = mapped(args, narrow), mapped(kwargs, narrow)
            try:
                with default_dtype(self._own):
                    output = func(*low_args, **low_kwargs)
            except Exception:
                return False, None
            wide = {id(low): leaf for leaf, low in given.values()}
            for tensor in plan_of(func).written_tensors(low_args, low_kwargs):
                if id(tensor) in wide:
                    wide[id(tensor)].copy_(tensor)
            return True, mapped(output, lambda leaf: wide.get(id(leaf), widened(leaf)))


def tolerance_of(low: torch.dtype) -> float:
    """Return the tolerance of moments of what was computed in a low dtype."""
    return _TOLERANCE.get(low, COARSE)


def widened(leaf: Any) -> Any:
    """Return a tensor of a low dtype in float64; anything else as it is."""
    return leaf.to(WIDER[leaf.dtype]) if isinstance(leaf, torch.Tensor) and leaf.dtype in WIDER else leaf


def _is_collective(func: Any) -> bool:
    plan = plan_of(func)
    return plan.collective is not None or plan.waits


def _rounded_inside(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype to which an op of another library rounds its arguments before it computes; ``None`` if it does
    not, or cannot be called again."""
    plan = plan_of(func)
    if getattr(func, "namespace", "aten") in _COMPILED_IN or plan.seeded or not _has_wide([args, kwargs]):
        return None
    try:
        for low in (torch.bfloat16, torch.float16, torch.float32):
            finer = torch.finfo(low).eps / 16
            results = []
            for factor in (1.0, 1.0 + finer):
                given = mapped([args, kwargs], functools.partial(_rounded, low=low, factor=factor))
                output = func(*given[0], **given[1])
                results.append([*tensors_in(output), *plan.written_tensors(*given)])
            if _has_wide(results[0]) and all(map(_equal_bits, *results)):
                return low
    except Exception:  # it has no float64 kernel
        return None
    return None


def _has_wide(value: Any) -> bool:
    return any(tensor.dtype is torch.float64 and tensor.numel() for tensor in tensors_in(value))


def _rounded(leaf: Any, *, low: torch.dtype, factor: float) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(low).to(torch.float64).mul_(factor) if leaf.dtype is torch.float64 else leaf.clone()


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype torch's default inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
