"""Check a compiled model of a test: compile it as it is, and compare with eager mode, as ``hashbench sweep --backend``
does with a zoo's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.check.function import SUITE, row_of_check
from hashbench.core.check.model import DEFAULT_ITERATIONS, BenchmarkRunner, subject_of
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload
from hashbench.extensions.compiled.check import CompiledCheck
from hashbench.extensions.compiled.program import CompiledModel
from hashbench.extensions.compiled.toolchain import require_backend


def is_trained(model: Callable[..., Any]) -> bool:
    """Return whether a model is in training: in ``train()`` mode, with parameters that require gradients, where
    gradients are enabled. A function that is no module is not."""
    if not isinstance(model, torch.nn.Module) or not (model.training and torch.is_grad_enabled()):
        return False
    return any(parameter.requires_grad for parameter in model.parameters())


def check_compiled(
    model: Callable[..., Any],
    inputs: Any,
    name: str,
    options: RunOptions,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
) -> Row:
    """Compile a model, and compare its results with those of eager mode, and its kernels with what they stand for.

    The model is copied for every run, and keeps its mode. Settings and random state of the caller are restored; what
    dynamo had compiled before is compiled anew when it is called again.

    Args:
        model: a module, or a function. What ``torch.compile`` has made of a module is that module.
        inputs: a tuple or list (positional arguments), a mapping (by name) or one tensor.
        name: its name in the row.
        options: as of :func:`~hashbench.core.check.function.check_function`, with ``backend`` and, as ``mode``,
            ``training`` (gradients are compared, too) or ``inference``.
        loss: gets the output, returns the scalar to differentiate; ``None``: the mean of all outputs with a gradient.
        tolerance: absolute and relative; ``None``: that of PyTorch's harness.

    Raises:
        HashbenchError: an unknown backend, no C++ compiler, or an unusable tracer.
    """
    require_backend(options.backend, device=options.device)
    runner = BenchmarkRunner(options)
    workload = Workload(_module_of(model, name), inputs, loss=loss, iterations=DEFAULT_ITERATIONS)
    spec = ModelSpec(SUITE, name)
    subject = replace(subject_of(runner, workload), spec=spec)
    compiled = CompiledModel.of(runner, workload, options)
    if tolerance is not None:
        compiled = replace(compiled, tolerance=replace(compiled.tolerance, tolerance=tolerance))
    with runner.pick_grad():
        return row_of_check(spec, options, lambda level: CompiledCheck(compiled, subject, options, level).run())


def _module_of(model: Callable[..., Any], name: str) -> torch.nn.Module:
    """Return the module that is copied and compiled: behind ``torch.compile``, or one that calls a function."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.Module):
        return model
    disabled = getattr(model, "_torchdynamo_disable", False)
    function = model if disabled else getattr(model, "_torchdynamo_orig_callable", model)

    def forward(_: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kind = type(name.rpartition(".")[2] or "function", (torch.nn.Module,), {"forward": forward})
    made: torch.nn.Module = kind()
    return made
