"""The check that the error of a kernel is rounding. torch is imported by the first call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from hashbench.testing.options import SEED, CheckFailedError

if TYPE_CHECKING:
    from hashbench.extensions.kernels.verdict import RoundingVerdict

SECONDS = 30.0
"""For one kernel: variations that do not fit are told."""


def within_rounding(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    approximate: float | None = None,
    without: Collection[str] = (),
    seed: int = SEED,
    seconds: float = SECONDS,
) -> RoundingVerdict:
    """Return whether rounding explains how a kernel differs from its reference, and else what is wrong with it.

    There is no tolerance: the reference runs in float64, and its own ops say what rounding explains
    (``docs/kernels.md``).

    Args:
        kernel: any callable: torch ops, an ``autograd.Function``, a compiled function, a C++ extension, a function that
            launches a Triton kernel, or one of NumPy arrays.
        reference: the same function in plain torch ops, which run in float64 as well.
        inputs: of both, in order; tensors of any shape, dtype and device, and what else they take.
        kwargs: arguments of both by name.
        backward: compare the gradient of each floating-point input, too.
        approximate: how good the kernel claims to be, relative to the largest value of a result, as ``3e-4``;
            ``None``: rounding alone.
        without: names of variations that are not tried, as ``nan``.
        seed: of the variations.
        seconds: for all variations; those that do not fit are told.

    Raises:
        CheckFailedError: nothing can be judged, as where the reference raises.
    """
    __tracebackhide__ = True
    from hashbench.core.errors import HashbenchError
    from hashbench.core.extensions import missing_extensions

    if "kernels" in missing_extensions():
        raise CheckFailedError("within_rounding needs hashbench/extensions/kernels, and this folder is missing.")
    from hashbench.extensions.kernels.check import within_rounding as check

    try:
        return check(
            kernel,
            reference,
            *inputs,
            kwargs=kwargs,
            backward=backward,
            approximate=approximate,
            without=without,
            seed=seed,
            seconds=seconds,
        )
    except HashbenchError as error:
        raise CheckFailedError(str(error)) from None


def assert_within_rounding(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    approximate: float | None = None,
    without: Collection[str] = (),
    seed: int = SEED,
    seconds: float = SECONDS,
) -> None:
    """Fail where rounding does not explain how a kernel differs from its reference; see :func:`within_rounding`.

    Raises:
        CheckFailedError: the kernel is wrong, or it is not known whether it is.
    """
    __tracebackhide__ = True
    verdict = within_rounding(
        kernel,
        reference,
        *inputs,
        kwargs=kwargs,
        backward=backward,
        approximate=approximate,
        without=without,
        seed=seed,
        seconds=seconds,
    )
    if not verdict.right:
        from hashbench.extensions.kernels.finding import finding_of

        finding = finding_of(verdict)
        raise CheckFailedError(str(finding), finding)
