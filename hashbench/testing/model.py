"""The check that two implementations compute the same function. torch is imported by the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hashbench.testing.options import SEED, CheckFailedError

if TYPE_CHECKING:
    import torch


def assert_same_model(
    a: Callable[..., Any],
    b: Callable[..., Any],
    inputs: Any,
    *,
    inputs_b: Any = None,
    outputs_a: Callable[[Any], Any] | None = None,
    outputs_b: Callable[[Any], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    bitwise: bool = False,
    seed: int = SEED,
) -> None:
    """Fail where two implementations compute different functions, whatever their modules, shapes and ops are.

    Both run in float64, where rounding vanishes, and what they compute is compared by content
    (``docs/implementations.md``).

    Args:
        a, b: modules, or any functions. Copies of modules are run, in their own mode.
        inputs: a tuple or list (positional arguments), a mapping (by name) or one tensor.
        inputs_b: those of (b); ``None``: the same.
        outputs_a, outputs_b: pick what is compared from what each returns: any nesting of tensors. ``None``: all of it.
        loss: gets what each returns, and gives a scalar; gradients are then compared as well.
        bitwise: fail for rounding, too.
        seed: of the generators before each run.

    Raises:
        CheckFailedError: they differ by a mistake, or it is not known whether they do.
    """
    __tracebackhide__ = True
    for name, model in (("a", a), ("b", b)):
        if not callable(model):
            raise CheckFailedError(f"assert_same_model needs a model to call as {name}, not a {type(model).__name__}.")
    from hashbench.core.errors import HashbenchError
    from hashbench.core.run.rng import preserved_rng
    from hashbench.extensions.implementations.pair.check import Side, compare_implementations
    from hashbench.extensions.implementations.pair.finding import finding_of
    from hashbench.extensions.implementations.pair.verdict import PairOutcome

    given = inputs if inputs_b is None else inputs_b
    sides = Side(lambda: a, lambda: inputs, outputs_a, loss), Side(lambda: b, lambda: given, outputs_b, loss)
    try:
        with preserved_rng():
            verdict = compare_implementations(*sides, seed=seed)
    except HashbenchError as error:
        raise CheckFailedError(str(error)) from None
    finding = finding_of(verdict)
    if not finding.equal or (bitwise and verdict.outcome is not PairOutcome.EQUAL):
        raise CheckFailedError(str(finding), finding)
