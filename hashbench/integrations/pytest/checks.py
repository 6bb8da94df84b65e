"""What the fixtures of extensions check, imported by the first test that asks for one. Each function returns what the
failed test prints; "" if nothing differs.

The first argument is the running test, the second its options; ``seed``, ``deterministic`` and the like are those of
:class:`~hashbench.integrations.pytest.running.Options`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hashbench.core.catalog import INVARIANCES, Status
from hashbench.core.check.function import FunctionCall
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import failure
from hashbench.core.records import Row, invariances_of
from hashbench.core.run.workload import Tokens, batch_of
from hashbench.integrations.pytest.running import RECORD, RECORDED, Options, RunningTest, name_of

SIZES = (1, 2, 8)
"""Default sizes that are compared with the whole batch, if smaller."""


def assert_batch_invariant(
    test: RunningTest,
    options: Options,
    model: Callable[..., Any],
    inputs: Any,
    *,
    sizes: Sequence[int] | None = None,
    invariance: str | Sequence[str] = "batch",
    tokens: Tokens | None = None,
) -> str:
    """Call the model, in ``eval`` mode, with its inputs and with the first 8, 2 and 1 items of them, each time from the
    reset random state and on a copy of the model; an item must not differ in any bit.

    Args:
        test: that asks.
        options: ``runs``, ``seed``, ``deterministic``, ``diagnose`` and ``tracer``.
        model: a module or any function.
        inputs: a tuple or list (positional arguments), a mapping (by name) or one tensor. The batch is the first
            dimension of all tensors among them; those outputs are compared whose first dimension follows it.
        sizes: of the smaller batches; ``None``: :data:`SIZES`.
        invariance: what ``hashbench sweep --invariance`` takes, words in one text or several. With others than
            ``batch`` the items are computed again in another order, or the tokens of a mapping beside padding or after
            a cache; all of them are checked.
        tokens: names the arguments for that, where they are not called as those of transformers.
    """
    __tracebackhide__ = True
    from hashbench.extensions.invariance.function import check_invariance

    try:
        words = [word.strip() for word in invariance.split(",")] if isinstance(invariance, str) else invariance
        invariances = invariances_of(words)
    except ValueError as error:
        pytest.fail(f"invalid invariance {invariance!r}: {error}")
    if not invariances:
        pytest.fail("invariance must not be empty")
    if sizes is not None and "batch" not in invariances:
        pytest.fail(f"sizes= requires invariance 'batch', got {invariance!r}")
    if tokens is not None and not any(INVARIANCES[f"{each}-invariance"].unit == "tokens" for each in invariances):
        pytest.fail(f"tokens= requires an invariance of tokens (padding, decode), got {invariance!r}")
    call, name = _call_of(model, inputs), name_of(model)
    batch = batch_of(inputs, None) or 0
    chosen = [size for size in SIZES if size < batch] if sizes is None else [n for n in sizes if n != batch]
    messages = []
    for each in invariances:
        run_options = test.run_options(call, options, mode=f"{each}-invariance")
        try:
            row = check_invariance(call, name, run_options, sizes=chosen, tokens=tokens)
        except HashbenchError as error:
            messages.append(f"{name}: {error}")
        else:
            messages.append(f"{name}: {row.error}" if row.accuracy == Status.SKIPPED else _failure(row, test))
    return "\n\n".join(filter(None, messages))


def assert_compiled_equals_eager(
    test: RunningTest,
    options: Options,
    model: Callable[..., Any],
    inputs: Any,
    *,
    backend: str = "inductor",
    training: bool | None = None,
    loss: Callable[[Any], Any] | None = None,
    tolerance: float | None = None,
) -> str:
    """Compile the model. A result must be within the tolerance of PyTorch's harness, and nothing that the compiler made
    may compute something else in float64, too, also if all results are within it.

    Args:
        test: that asks.
        options: ``seed``, ``deterministic``, ``diagnose`` and ``tracer``.
        model: a module or any function.
        inputs: as of :func:`assert_batch_invariant`.
        backend: of ``torch.compile``.
        training: differentiate a loss and compare gradients, parameters and buffers; ``None``: if the model is in
            ``train()`` mode and has parameters that require gradients.
        loss: gets the output and returns a scalar; ``None``: the mean of all outputs.
        tolerance: absolute and relative; ``None``: that of the harness.
    """
    __tracebackhide__ = True
    from hashbench.extensions.compiled.failure import accuracy_finding, is_wrong
    from hashbench.extensions.compiled.function import check_compiled, is_trained

    if tolerance is not None and not 0 <= tolerance < float("inf"):
        pytest.fail(f"tolerance must be a number >= 0, got {tolerance!r}")
    trained = is_trained(model) if training is None else training
    run_options = test.run_options(_call_of(model, inputs), options, mode="training" if trained else "inference")
    run_options = replace(run_options, backend=backend, runs=2)
    row = check_compiled(model, inputs, name_of(model), run_options, loss=loss, tolerance=tolerance)
    return str(accuracy_finding(row, folder=test.folder)) if is_wrong(row) else ""


def assert_ranks_deterministic(
    test: RunningTest,
    options: Options,
    factory: Callable[[], Any],
    *,
    ranks: int = 2,
    training: bool = True,
    device: str = "cpu",
) -> str:
    """Run the model of the factory twice on several processes with a process group. Two runs must not differ on any
    rank in any bit, nor parameters that must be replicas between ranks; the message names rank and kernel.

    Args:
        test: that asks.
        options: ``runs``, ``seed``, ``deterministic``, ``diagnose`` and ``tracer``.
        factory: a function of a module, which every rank imports: called without arguments for every run, it returns
            ``(module, example_inputs)`` or a ``hashbench.Workload``.
        ranks: number of processes.
        training: train it, and compare loss, gradients and parameters, too.
        device: of the model.
    """
    __tracebackhide__ = True
    from hashbench.extensions.ranks.function import check_ranks

    if type(ranks) is not int or ranks < 1:
        pytest.fail(f"ranks must be an int >= 1, got {ranks!r}")
    mode = "training" if training else "inference"
    run_options = test.run_options(FunctionCall(factory), options, mode=mode)
    run_options = replace(run_options, device=device, runs=run_options.runs or 2)
    return _failure(check_ranks(factory, name_of(factory), run_options, ranks=ranks), test)


def assert_kernels_unchanged(
    test: RunningTest,
    options: Options,
    model: Callable[..., Any],
    inputs: Any,
    file: str | os.PathLike[str],
    *,
    threads: int | None = None,
    name: str | None = None,
) -> str:
    """Call the model once to see which kernels it calls, and run each that the file has on the synthetic inputs of
    ``hashbench fingerprint``. None may give something else than the file says, and the model calls no other kernels.

    With ``--hashbench-record`` the file is written instead.

    Args:
        test: that asks.
        options: ``seed``, ``deterministic`` and ``tracer``.
        model: a module or any function.
        inputs: as of :func:`assert_batch_invariant`.
        file: a relative path is one from the folder of the test's file.
        threads: torch's; ``None``: as many as when it was recorded.
        name: what the file calls the model; ``None``: its class, or the function's name.
    """
    __tracebackhide__ = True
    from hashbench.extensions.fingerprint.check import changed_kernels, record_function

    def keep(text: str) -> str:
        kept = test.folder / "kernels.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text + "\n", encoding="utf-8")
        return os.path.relpath(kept)

    if threads is not None and (type(threads) is not int or threads < 1):
        pytest.fail(f"threads must be an int >= 1, got {threads!r}")
    call, path, named = _call_of(model, inputs), test.item.path.parent / file, name or name_of(model)
    run_options = replace(test.run_options(call, options), threads=threads)
    if test.item.config.getoption(RECORD):
        what = record_function(call, named, run_options, path)
        test.item.user_properties.append((RECORDED, f"{file}: {named}, {what}"))
        return ""
    if not path.exists():
        return f"{named}: there is no {file}, so nothing was compared. Record it: `pytest {RECORD}`."
    found = changed_kernels(call, named, run_options, path, keep=keep)
    return "" if found is None else str(found)


def _failure(row: Row, test: RunningTest) -> str:
    return "" if row.accuracy == Status.PASS else str(failure(row, folder=test.folder))


def _call_of(model: Callable[..., Any], inputs: Any) -> FunctionCall:
    """Return the call of a model whose inputs are a tuple or list, a mapping or one tensor."""
    if isinstance(inputs, Mapping):
        return FunctionCall.of(model, (), inputs)
    return FunctionCall.of(model, inputs if isinstance(inputs, (list, tuple)) else [inputs], {})
