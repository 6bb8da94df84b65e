"""Verdicts whose text the golden files hold: one for each kind of line of ``watch diff`` and ``watch resume``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hashbench.core.divergence import find
from hashbench.core.records import Result, Trace
from hashbench.core.trace.file import parse_digest
from hashbench.extensions.watch.compare import compare
from hashbench.extensions.watch.file import Recording
from hashbench.extensions.watch.resume import ResumeVerdict, judge
from hashbench.extensions.watch.traced import FurtherRun, LoopVerdict, TracedSteps
from tests.extensions.watch.test_compare import HEADER, recording, with_begin

COMMAND = replace(HEADER, command=("python", "train.py", "--name", "my run"))
Changes = Mapping[int, Mapping[str, Mapping[str, str]]]


def verdict(first: Recording, second: Recording, **more: object) -> LoopVerdict:
    folders = first.path.parent, second.path.parent
    return LoopVerdict(folders, (compare(first, second),), recordings=(first, second), **more)  # type: ignore[arg-type]


def against(changes: Changes | None = None, **more: object) -> LoopVerdict:
    """An ordinary run, and one with these changes."""
    return verdict(recording("a"), recording("b", changes), **more)


def under(one: Recording, threads: str, environment: dict[str, str]) -> Recording:
    """The run under other settings."""
    header = replace(COMMAND, settings={"num_threads": threads}, environment=environment)
    steps = {number: replace(step, settings=header.settings) for number, step in one.steps.items()}
    return replace(one, header=header, steps=steps)


def of_two_ranks() -> LoopVerdict:
    first = compare(recording("a"), recording("b", {4: {"loss": {"0": "x"}}}))
    other = replace(compare(recording("a"), recording("b", {4: {"batch": {"0": "x"}}})), rank=1)
    return LoopVerdict((Path("a"), Path("b")), (first, other), recordings=(recording("a"), recording("b")))


EQUAL = Trace((), (), (Result("loss", parse_digest("float32[]:00")),))
TRACED = TracedSteps(0, 9, 10, find(EQUAL, EQUAL))
BENIGN = replace(find(EQUAL, EQUAL), benign=("forward.9//aten.add.Tensor#0",))
FURTHER = (FurtherRun(Path("c"), 10, differs=True, equal=False), FurtherRun(Path("d"), None, differs=False, equal=True))
LOSS = {10: {"loss": {"0": "x"}}}
STRICT, OMP = {"MKL_CBWR": "AVX2,STRICT"}, {"OMP_NUM_THREADS": "2"}
RANKS = replace(COMMAND, world_size=2)
SHORT = replace(recording("b"), steps={at: step for at, step in recording("b").steps.items() if at < 7})

RACE = verdict(
    recording("runs/a", header=COMMAND),
    recording("runs/b", {10: {"gradient": {"c.weight": "x"}, "parameter": {"c.weight": "x"}}}, header=COMMAND),
)
LOOPS: Mapping[str, LoopVerdict] = {
    "equal runs": against(),
    "a difference that kernels make": RACE,
    "another batch": against({5: {"batch": {"1": "x"}}}),
    "a batch that one run lacks": against({5: {"batch": {"2": "x"}}}),
    "another learning rate": against({5: {"lr": {"0": "0.2"}}}),
    "another option of the optimizer": against({5: {"options": {"momentum.0": "0.9"}}}),
    "another generator and batch": against({5: {"generator": {"torch": "x"}, "batch": {"0": "x"}}}),
    "a parameter whose gradient agrees": against({5: {"parameter": {"b.weight": "x"}}}),
    "two ranks": of_two_ranks(),
    "ranks whose launcher is not known": verdict(
        recording("a", header=RANKS), recording("b", {5: {"loss": {"0": "x"}}}, header=RANKS)
    ),
    "a run that is shorter": verdict(recording("a"), SHORT),
    "a difference that did not come again": against(traced=(TRACED,), further=FURTHER),
    "records that differ without reaching a result": against(traced=(TracedSteps(0, 9, 10, BENIGN),)),
    "a trace that cannot be judged": against(traced=(TracedSteps(0, 9, 10, None, "cannot read it."),)),
    "settings that differ before a kernel": verdict(
        under(recording("a"), "1", STRICT), under(recording("b", LOSS), "2", OMP)
    ),
    "settings that nothing follows": verdict(under(recording("a"), "1", {}), under(recording("b"), "2", {})),
    "settings beside other data": verdict(
        under(recording("a"), "1", {}), under(recording("b", {5: {"batch": {"0": "x"}}}), "2", {})
    ),
}


def resumed(changes: Changes | None = None, **more: object) -> ResumeVerdict:
    return judge(recording("a"), recording("b", changes, **more), at=0)


def shifted(by: int) -> ResumeVerdict:
    """A resumed run that counts its steps from 0."""
    whole = recording("a")
    steps = {number - by: replace(step, number=number - by) for number, step in whole.steps.items() if number >= by}
    return judge(whole, recording("b", steps=steps), at=by)


def clamped() -> ResumeVerdict:
    """A loss beside what a program changes between steps."""
    whole = recording("a")
    before = replace(whole.steps[4], parts={**whole.steps[4].parts, "parameter": {"a.weight": "clamped"}})
    lost = {"parameter": {"a.weight": "x"}}
    later = {at: replace(step, parts={**step.parts, **lost}) for at, step in whole.steps.items() if at > 4}
    return judge(whole, recording("b", steps=later, before=before, header=replace(HEADER, start=5)))


RESUMES: Mapping[str, ResumeVerdict] = {
    "equal runs": shifted(5),
    "a generator and a batch": resumed({0: {"generator": {"torch": "x"}, "batch": {"0": "x"}}}),
    "what a program changes between steps": clamped(),
    "a later difference": resumed({8: {"loss": {"0": "x"}}}),
    "a generator that is set again": resumed({0: {"generator": {"torch": "x"}}}),
    "an average": judge(with_begin("a", {}), with_begin("b", {1: "x"}), at=0),
    "a run that was killed": resumed(ended="cut"),
    "a run that raised": resumed(ended="ValueError: mine"),
    "a loss that nothing explains": resumed({0: {"loss": {"0": "x"}}}),
    "a share of the tensors": resumed({0: {"lr": {"0": "x"}}}),
}
