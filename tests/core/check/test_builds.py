"""A second build of a model: what differs from the first, and what stops it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from hashbench.core.check.builds import LONGEST, contents_of, second_build
from hashbench.core.run.workload import Workload
from tests.core.check.model_helpers import INFERENCE, row_of, workload

COUNTER = itertools.count()


def built(**parts) -> Workload:
    module = torch.nn.Linear(3, 2)
    module.scale = 2.0
    for name, value in parts.get("attributes", {}).items():
        setattr(module, name, value)
    return Workload(**{"module": module, "inputs": (torch.ones(4, 3),)} | parts.get("workload", {}))


def unseeded() -> np.random.Generator:
    return np.random.default_rng([7, next(COUNTER)])


def with_weights() -> Workload:
    made = built()
    with torch.no_grad():
        made.module.weight += torch.from_numpy(unseeded().normal(size=(2, 3)))
    return made


BUILDS = {
    "equal": (built, "equal"),
    "weights of its own": (with_weights, "differs in model.parameter.weight"),
    "an array": (lambda: built(attributes={"table": unseeded().normal(size=3)}), "differs in model.table"),
    "a number": (lambda: built(attributes={"scale": unseeded().normal()}), "differs in model.scale"),
    "a part in one build alone": (
        lambda: built(attributes={"late": 1} if next(COUNTER) % 2 else {}),
        "differs in model.late",
    ),
    "inputs": (
        lambda: built(workload={"inputs": {"x": torch.from_numpy(unseeded().normal(size=3))}}),
        "differs in input.x",
    ),
    "inputs of every run": (lambda: built(workload={"inputs": None, "make_inputs": unseeded}), "equal"),
    "what cannot be compared": (lambda: built(attributes={"hook": lambda: None}), "equal"),
}


@pytest.mark.parametrize(("build", "said"), BUILDS.values(), ids=BUILDS)
def test_second_build(build, said: str) -> None:
    torch.manual_seed(0)
    first = contents_of(build())
    torch.manual_seed(0)
    assert second_build(first, build, first_seconds=1.0).partition(",")[0] == said


def test_second_build_that_is_not_made_or_fails() -> None:
    assert second_build({}, built, first_seconds=LONGEST + 15) == "not made: the first took 75 s"
    assert second_build({}, lambda: built(workload={"inputs": None}), first_seconds=1.0).startswith(
        "failed: ValueError"
    )


@pytest.mark.parametrize(
    ("build", "options", "said"),
    [
        (workload, INFERENCE, "equal"),
        (lambda: workload(inputs=(torch.ones(4, 3) + next(COUNTER),)), INFERENCE, "differs in input.0"),
        (lambda: workload(lambda model, out: out + model.run), INFERENCE, ""),
        (workload, replace(INFERENCE, mode="batch-invariance"), ""),
    ],
    ids=["equal", "other inputs", "runs that differ", "another check"],
)
def test_row_of_a_model_that_passes_has_the_second_build(build, options, said: str) -> None:
    if options.batch_invariant or options.backend:
        pytest.importorskip("hashbench.extensions.invariance")
    assert row_of(build, options).second_build.partition(",")[0] == said
