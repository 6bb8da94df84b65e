"""Numeric check: a model before and after a transformation, compared by tolerance and bit by bit.

The transformation may be a fusion, a quantization, another backend, ``torch.compile``. The functions have the names and
positional arguments of torch's own ``torch/_inductor/fx_passes/numeric_utils.py``, so that a user of it changes one
import. What they return is true and false as there, and says more; what differs is said in ``docs/numeric.md``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hashbench.core.run.rng import reset_rng_state
from hashbench.tools.numeric.compare import compare_mappings, leaves_of, without_wrappers
from hashbench.tools.numeric.report import (
    STAGES,
    Comparison,
    FirstDifference,
    Raised,
    Rename,
    Report,
    Rule,
    TensorComparison,
    as_json,
    as_text,
)
from hashbench.tools.numeric.running import MAIN_RANDOM_SEED, NumericRequest, check

__all__ = [
    "MAIN_RANDOM_SEED",
    "STAGES",
    "Comparison",
    "FirstDifference",
    "NumericRequest",
    "Raised",
    "Report",
    "TensorComparison",
    "as_json",
    "as_text",
    "clean_memory",
    "compare_dict_tensors",
    "compare_forward_output",
    "compare_gradients",
    "compare_parameters",
    "compare_tuple_tensors",
    "numeric_check_if_enabled",
    "run_model",
    "set_deterministic",
]


def set_deterministic() -> None:
    """Seed Python's, NumPy's and torch's generators with :data:`MAIN_RANDOM_SEED` and turn deterministic algorithms on.

    It stays so: that is what the function is for. :func:`run_model` does not need it and leaves nothing behind.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    reset_rng_state(MAIN_RANDOM_SEED)
    torch.use_deterministic_algorithms(True)


def clean_memory() -> None:
    """Release what nobody holds any more, on the accelerator too where there is one."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def compare_dict_tensors(
    dict_base: Mapping[Any, Any],
    dict_control: Mapping[Any, Any],
    precision: float | None = None,
    *,
    rename: Rename = None,
    ignore: Collection[str] = (),
) -> Comparison:
    """Compare tensors name by name.

    Args:
        dict_base, dict_control: tensors, or nested containers of them, by name, before and after. ``None`` against
            ``None`` agrees; a name that one lacks, and ``None`` against a tensor, are differences.
        precision: ``rtol`` and ``atol``; ``None``: those of ``torch.testing.assert_close`` for the dtype.
        rename: from a name before to the name after; see :func:`~hashbench.tools.numeric.compare.renamed`.
        ignore: differences of form that count as none, of ``dtype``, ``device``, ``layout``.

    Raises:
        HashbenchError: a tolerance or name that means nothing.
    """
    before, after = (
        {name: leaf for key, value in values.items() for name, leaf in leaves_of(value, str(key)).items()}
        for values in (dict_base, dict_control)
    )
    return compare_mappings("tensors", before, after, rule=Rule(precision, ignore=frozenset(ignore)), rename=rename)


def compare_tuple_tensors(
    tuple_base: Any, tuple_control: Any, precision: float | None = None, *, ignore: Collection[str] = ()
) -> Comparison:
    """Compare outputs place by place: tuples, or any nesting of lists, dicts and dataclasses. Another length is a
    difference; see :func:`compare_dict_tensors` for the rest."""
    before, after = leaves_of(tuple_base, "output"), leaves_of(tuple_control, "output")
    return compare_mappings("outputs", before, after, rule=Rule(precision, ignore=frozenset(ignore)))


def compare_parameters(
    model_base: torch.nn.Module,
    model_control: torch.nn.Module,
    precision: float | None = None,
    *,
    rename: Rename = None,
    ignore: Collection[str] = (),
) -> Comparison:
    """Compare the parameters of two models by name; see :func:`compare_dict_tensors`."""
    before, after = (without_wrappers(model.named_parameters()) for model in (model_base, model_control))
    return compare_mappings("parameters", before, after, rule=Rule(precision, ignore=frozenset(ignore)), rename=rename)


def compare_forward_output(
    pred_base: Any, pred_control: Any, precision: float | None = None, *, ignore: Collection[str] = ()
) -> Comparison:
    """Do the same as :func:`compare_tuple_tensors`."""
    return compare_tuple_tensors(pred_base, pred_control, precision, ignore=ignore)


def compare_gradients(
    model_base: torch.nn.Module,
    model_control: torch.nn.Module,
    precision: float | None = None,
    *,
    rename: Rename = None,
    ignore: Collection[str] = (),
) -> Comparison:
    """Compare the gradients of two models' parameters by name. A gradient that one model lacks is a difference."""
    before, after = (
        {name: tensor.grad for name, tensor in without_wrappers(model.named_parameters()).items()}
        for model in (model_base, model_control)
    )
    return compare_mappings("gradients", before, after, rule=Rule(precision, ignore=frozenset(ignore)), rename=rename)


def run_model(
    model_base: Callable[..., Any],
    model_control: Callable[..., Any],
    model_input: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    num_iterations: int = 10,
    precision: float | None = 1e-4,
    **options: Any,
) -> Report:
    """Run two models on the same inputs, some iterations long, and compare all that they leave.

    Copies of the models are run; models, inputs, random state and settings of the caller are as they were afterwards.
    In every iteration, and before every stage of it, the generators are seeded anew, and the inputs are cloned; the
    parameters go on from the iteration before. Compared are, in this order, :data:`STAGES`.

    Args:
        model_base, model_control, model_input, num_iterations, precision: ``before``, ``after``, ``inputs``,
            ``iterations`` and ``precision`` of :class:`NumericRequest`.
        options: its other fields.

    Returns:
        A report, true if all is equal within tolerance. What a model raises is in its ``raised``.

    Raises:
        HashbenchError: what was asked for means nothing.
    """
    clean_memory()
    return check(NumericRequest(model_base, model_control, model_input, num_iterations, precision, **options))


def numeric_check_if_enabled(
    gm_before_fx_passes: Callable[..., Any],
    gm_after_fx_passes: Callable[..., Any],
    example_inputs: Sequence[Any],
    num_iterations: int,
    precision: float | None,
    **options: Any,
) -> Report:
    """Call :func:`run_model` under ``torch.autograd.set_detect_anomaly``. What a model raises does not stop the caller,
    as with torch's own, but makes the report false."""
    with torch.autograd.set_detect_anomaly(True):
        return run_model(gm_before_fx_passes, gm_after_fx_passes, example_inputs, num_iterations, precision, **options)
