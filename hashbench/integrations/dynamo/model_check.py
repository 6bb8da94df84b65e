"""The row of one model that the harness runs: what became of its two eager runs, and if they differ, why.

The comparison, the confirming pairs, the experiments, the repro and the row are those of ``hashbench sweep``; only a
run is made as the harness makes one: its copy of the model, its optimizer, its inputs, its iterations. All of it
happens when the harness has written its own row.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.check.pair import PairCheck, compared, row_of
from hashbench.integrations.dynamo.phases import (
    COMPILING,
    EagerRuns,
    counting,
    named_results,
    optimizer_arguments,
    step_of,
)
from hashbench.integrations.dynamo.session import Session, amend_note
from hashbench.records import DTYPES, Failure, ModelSpec, RunCounts, RunOptions
from hashbench.results.folder import file_key
from hashbench.run import outputs
from hashbench.run.outcome import Attempt, Outcome, Prepared, Run, add_result, attempt
from hashbench.run.settings import claim_workspace, settings
from hashbench.trace.api import HashDebugTrace

FRESH_TARGET = "hashbench.integrations.dynamo.fresh:FreshHarness"
"""What builds the model again in a fresh process."""
PAIRS_ON_DEMAND = 3
"""Own pairs that look for a difference which the harness has seen."""
_TIME_SHARE = 0.7
"""Part of what is left of the harness's ``--timeout`` that the diagnosis may take. A child that is ended then has two
rows in the harness's CSV, which the harness's own tools take for none."""
_CONFIRMING_RUNS = 12
"""Runs, in times of a traced one, that must fit in before looking for a cause makes sense."""


def harness_attempt(harness: Any, names: Mapping[str, Any], model: Any, inputs: Any, options: RunOptions) -> Attempt:
    """What makes one run of the harness's model exactly as the harness does, within the settings that it has set.

    ``names`` are the globals of the harness's module.
    """

    def prepare() -> Prepared:
        copied = harness.deepcopy_and_maybe_parallelize(model)
        harness.init_optimizer(*optimizer_arguments(names, copied))
        cloned = names["clone_inputs"](inputs)
        return Prepared(copied, cloned, functools.partial(_iterate, harness, copied, cloned))

    return functools.partial(attempt, prepare, options)


def _iterate(harness: Any, model: Any, inputs: Any, trace: HashDebugTrace | None) -> dict[str, Any]:
    """The harness's iterations, and what the harness compares: the results of the last one."""
    with trace if trace is not None else nullcontext():
        returned = harness.run_n_iterations(model, inputs, *counting(step_of(harness), trace))
    results: dict[str, Any] = {}
    for name, value in named_results(returned).items():
        add_result(results, trace, name, value, copied=False)
    return results


def _compared(outcome: Outcome, first: Run, second: Run) -> Outcome:
    """The outcome of two runs, as in a sweep."""
    with _disable_current_modes(), torch.no_grad():
        outcome = compared(outcome, first, second)
    differing = int(outcome.accuracy != "pass")
    return replace(outcome, run_counts=RunCounts(1, differing, distinct=1 + differing))


def _further_pair(outcome: Outcome, make: Attempt) -> Outcome:
    """The outcome of one more pair of traced runs."""
    first, second = (make() for _ in range(2))
    if isinstance(first, Failure) or isinstance(second, Failure):
        return replace(outcome, confirmed="no: a further run failed")
    return _compared(outcome, first, second)


class ModelCheck:
    """One model from the call of ``check_accuracy`` to our row.

    Args:
        session: where our results go.
        harness: the harness's runner.
        names: the globals of its module.
        name, model, inputs: as ``check_accuracy`` was given them.
    """

    def __init__(
        self, session: Session, harness: Any, names: dict[str, Any], *, name: str, model: Any, inputs: Any
    ) -> None:
        self.session, self.harness, self.names, self.name = session, harness, names, name
        self.began = time.perf_counter()
        self.options = options_of(session, harness.args, device=str(names.get("current_device", "cpu")))
        self.spec = ModelSpec(
            suite=session.suite,
            name=name,
            batch_size=_whole(names.get("current_batch_size")),
            arguments={"script": session.script, "arguments": list(session.arguments), "only": harness.args.only},
        )
        claim_workspace(self.options.device)
        self.model, self.inputs = model, inputs
        self.eager = EagerRuns(harness, names, model=model, inputs=inputs, traced=session.trace == "always")
        self.eager.on_compared = self._look
        self.outcome = Outcome("pass", settings()["deterministic_algorithms"], iterations=harness.args.iterations)
        amend_note(session, name, device=self.options.device, mode=self.options.mode)

    def _look(self, one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
        """While the harness still holds both results: how they differ, in numbers."""
        if len(self.eager.runs) == 2:
            runs = [replace(run, results=found) for run, found in zip(self.eager.runs, (one, two), strict=True)]
            self.outcome = _compared(self._begun(), *runs)
        elif not self.eager.answer:
            with _disable_current_modes(), torch.no_grad():
                difference = outputs.compare(one, two)
            differ = replace(self._begun(), accuracy="eager_two_runs_differ", run_counts=RunCounts(1, 1, 2))
            self.outcome = replace(differ, difference=difference)

    def _begun(self) -> Outcome:
        traces = [run.trace for run in self.eager.runs if run.trace is not None]
        return replace(self.outcome, runs=2, ops=len(traces[0].records) if traces else None)

    # ------------------------------------------------------------------------------ when the harness has its own row

    def conclude(self, status: str) -> None:
        """Write our row. ``status`` is the harness's word."""
        key = file_key(suite=self.spec.suite, mode=self.options.mode, name=self.name)
        csv, problem = str(self.names.get("output_filename") or ""), "; ".join(self.eager.problems)[:500]
        amend_note(self.session, self.name, status=status, csv=csv, problem=problem, key=key)
        with self.harness.pick_grad(self.name, self.harness.args.training):
            model, inputs = self.harness.maybe_cast(self.model, self.inputs)
            make = harness_attempt(self.harness, self.names, model, inputs, self.options)
            outcome, error = self._happened(make, status)
            if outcome.accuracy == "eager_two_runs_differ":
                outcome = self._explained(make, outcome)
        row = row_of(self.spec, self.options, outcome, seconds=time.perf_counter() - self.began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))

    def _happened(self, make: Attempt, status: str) -> tuple[Outcome, str]:
        """What became of the two eager runs, and words for where that is not what the harness wrote."""
        eager = self.eager
        if eager.phase == 0:
            return replace(self.outcome, accuracy="pass_due_to_skip"), "the harness ran no eager pair"
        if eager.phase < COMPILING and status.startswith(("eager_1st_run", "eager_2nd_run")):
            return replace(self.outcome, accuracy=status, failure=eager.failure, runs=eager.phase), ""
        if eager.compare_error:
            return self._not_compared()
        outcome = self.outcome if eager.answer is not None else self._unasked(make)
        if eager.answer is False and outcome.difference is None:
            return outcome, "same() of the harness said no to two runs of equal bits (a NaN equals nothing there)"
        if outcome.accuracy == "eager_two_runs_differ" and outcome.verdict is None:
            outcome = self._found_again(make, outcome)
        return outcome, _harness_word(status, outcome)

    def _not_compared(self) -> tuple[Outcome, str]:
        said = f"same() of the harness raised {self.eager.compare_error}"
        outcome = replace(self.outcome, accuracy="results_not_comparable", failure=Failure(said))
        if len(self.eager.runs) != 2:
            return outcome, ""
        found = _compared(replace(self._begun(), accuracy="pass"), *self.eager.runs)
        if not self.eager.runs[0].results:
            return replace(outcome, ops=found.ops, runs=2), ""
        agree = "agree" if found.accuracy == "pass" else "do not agree"
        return (
            replace(found, accuracy="results_not_comparable", failure=Failure(said), difference=None),
            f"bit by bit the two runs {agree}",
        )

    def _unasked(self, make: Attempt) -> Outcome:
        """The harness made both runs and did not compare them: its list says that they differ."""
        if len(self.eager.runs) == 2:
            return _compared(self._begun(), *self.eager.runs)
        return _further_pair(replace(self.outcome, runs=2), make)

    def _found_again(self, make: Attempt, outcome: Outcome) -> Outcome:
        """A difference of two runs that were not traced, in further pairs that are."""
        for _ in range(PAIRS_ON_DEMAND):
            found = _further_pair(replace(outcome, accuracy="pass"), make)
            if found.accuracy != "pass":
                return found
        return replace(outcome, confirmed=f"no: {PAIRS_ON_DEMAND} further pairs agreed")

    def _explained(self, make: Attempt, outcome: Outcome) -> Outcome:
        left = _TIME_SHARE * (float(getattr(self.harness.args, "timeout", 2000)) - _age())
        if self.session.budget <= 0 or left < _CONFIRMING_RUNS * (time.perf_counter() - self.began):
            why = "no experiments were asked for" if self.session.budget <= 0 else "the harness's --timeout is too near"
            return replace(outcome, confirmed=f"not tried: {why}")
        options = replace(self.options, diagnose_budget=min(self.session.budget, left))
        check = PairCheck(make, options, outcome.deterministic, spec=self.spec, target=FRESH_TARGET)
        return check.diagnose(check.confirm(outcome))


def options_of(session: Session, args: Any, *, device: str) -> RunOptions:
    """What the harness's flags mean in our words."""
    return RunOptions(
        mode="training" if args.training else "inference",
        device=device,
        dtype=next((dtype for dtype in DTYPES if getattr(args, dtype, False)), ""),
        iterations=_whole(getattr(args, "iterations", None)),
        runs=2,
        diagnose_budget=session.budget,
        output=session.folder,
    )


def _harness_word(status: str, outcome: Outcome) -> str:
    """Words for a status of the harness that hides what happened."""
    if outcome.accuracy == "eager_two_runs_differ" and status != outcome.accuracy:
        return f"the harness wrote {status}"
    return ""


def _age() -> float:
    """Seconds since this process began: the harness counts from there."""
    return time.time() - psutil.Process().create_time()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
