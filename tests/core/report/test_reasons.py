"""Which kind of reason made a model get worse: the rule as a truth table."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest

from hashbench.core.report.reasons import KernelSigns, Reason, Sign, Signs, decide_reason, explained_by_chance

MODEL, MACHINE, KERNEL = ({name: Sign.CHANGED} for name in ("model", "environment", "kernel"))
SAME_BUILD = {"model": Sign.SAME, "environment": Sign.SAME}
VARIES, SAME_KERNEL = {"kernel": Sign.VARIES}, {"kernel": Sign.SAME}
SOME_RUNS, LACKED, COMPILED = {"some_runs": True}, {"lacked": True}, {"compiled": True}

TRUTH = {
    "nothing is recorded": ({}, Reason.UNKNOWN),
    "nothing that is recorded changed": (SAME_BUILD, Reason.UNKNOWN),
    "it ran under other conditions": ({"comparable": False}, Reason.UNKNOWN),
    "it ran under other conditions and out of memory": ({"comparable": False, **LACKED}, Reason.UNKNOWN),
    "it ran out of memory": (LACKED, Reason.MACHINE),
    "it ran out of memory on another machine": (LACKED | MACHINE, Reason.MACHINE),
    "it ran out of memory in the compiled run": (LACKED | COMPILED, Reason.MACHINE),
    "it ran out of memory, and its file changed": (LACKED | MODEL, Reason.UNKNOWN),
    "compiled code does not do what eager mode does": (COMPILED, Reason.COMPILER),
    "compiled code does not, since torch changed": (COMPILED | MACHINE, Reason.COMPILER),
    "compiled code does not, in some runs": (COMPILED | SOME_RUNS, Reason.COMPILER),
    "compiled code does not, and its file changed": (COMPILED | MODEL, Reason.COMPILER),
    "it differs in some runs": (SOME_RUNS, Reason.FLAKE),
    "it differs in some runs of the same build": (SOME_RUNS | SAME_BUILD, Reason.FLAKE),
    "it differs in some runs, and torch changed": (SOME_RUNS | MACHINE, Reason.FLAKE),
    "it differs in some runs, and its kernel varies": (SOME_RUNS | MACHINE | VARIES, Reason.FLAKE),
    "it differs in some runs, and torch changed its kernel": (SOME_RUNS | MACHINE | KERNEL, Reason.UNKNOWN),
    "it differs in some runs, and its file changed": (SOME_RUNS | MODEL, Reason.UNKNOWN),
    "torch changed its kernel": (MACHINE | KERNEL, Reason.LIBRARY),
    "torch changed its kernel, the file did not": (MACHINE | KERNEL | {"model": Sign.SAME}, Reason.LIBRARY),
    "with another torch its kernel varies": (MACHINE | VARIES, Reason.LIBRARY),
    "torch changed its kernel, and its file changed": (MACHINE | KERNEL | MODEL, Reason.UNKNOWN),
    "torch changed other kernels": (MACHINE | SAME_KERNEL, Reason.UNKNOWN),
    "torch changed, and nobody recorded kernels": (MACHINE, Reason.UNKNOWN),
    "its kernel changed, and nothing else": (SAME_BUILD | KERNEL, Reason.UNKNOWN),
    "its kernel changed, and nobody knows the machine": (KERNEL, Reason.UNKNOWN),
    "its file changed, and nothing else": (SAME_BUILD | MODEL, Reason.MODEL),
    "its file changed, and its kernel did not": (SAME_BUILD | MODEL | SAME_KERNEL, Reason.MODEL),
    "its file changed, and nobody knows the machine": (MODEL, Reason.UNKNOWN),
    "its file and torch changed at once": (MODEL | MACHINE, Reason.UNKNOWN),
    "its file and torch changed, its kernel did not": (MODEL | MACHINE | SAME_KERNEL, Reason.UNKNOWN),
}


@pytest.mark.parametrize(("signs", "reason"), TRUTH.values(), ids=TRUTH)
def test_the_reason_is(signs, reason):
    assert decide_reason(Signs(**signs)) is reason


ALL = [
    Signs(**dict(zip((field.name for field in fields(Signs)), values, strict=True)))
    for values in product(*([True, False],) * 4, *([*Sign],) * 3)
]


def test_two_changes_at_once_are_never_blamed_on_one():
    at_once = [signs for signs in ALL if (signs.model, signs.environment) == (Sign.CHANGED, Sign.CHANGED)]
    assert at_once
    assert {decide_reason(signs) for signs in at_once} == {Reason.UNKNOWN, Reason.COMPILER}
    assert all(signs.compiled for signs in at_once if decide_reason(signs) is Reason.COMPILER)


def test_without_records_no_change_is_blamed():
    unrecorded = [signs for signs in ALL if {signs.model, signs.environment, signs.kernel} == {Sign.UNKNOWN}]
    assert not {decide_reason(signs) for signs in unrecorded} & {Reason.LIBRARY, Reason.MODEL}


def test_each_reason_is_reached():
    assert {decide_reason(signs) for signs in ALL} == {*Reason}


CHANCES = [
    pytest.param(0.5, 1, True, id="half of the runs differ, and one pair agreed"),
    pytest.param(0.9, 1, True, id="most runs differ, and one pair agreed"),
    pytest.param(0.97, 1, False, id="nearly all runs differ, and one pair agreed"),
    pytest.param(0.5, 10, False, id="half of the runs differ, and ten pairs agreed"),
    pytest.param(1.0, 1, False, id="all runs differ"),
    pytest.param(0.0, 1, False, id="no run differs"),
]


@pytest.mark.parametrize(("rate", "pairs", "explains"), CHANCES)
def test_chance_explains_an_earlier_pass(rate, pairs, explains):
    assert explained_by_chance(rate, pairs) is explains


def test_an_op_has_the_worst_sign_of_its_kernels():
    signs = KernelSigns(changed=frozenset("ab"), varies=frozenset("bc"), same=frozenset("cd"))
    assert [signs.of(op) for op in "abcde"] == [Sign.CHANGED, Sign.CHANGED, Sign.VARIES, Sign.SAME, Sign.UNKNOWN]
