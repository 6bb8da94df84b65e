"""One model in the hands of the harness: what became of its two eager runs, and if they differ, why.

All that decides is the code of ``hashbench sweep``: a :class:`HarnessRunner` is a ``BenchmarkRunner`` whose hooks
(copy, optimizer, inputs, iterations) are those of PyTorch's harness, so the confirming pairs, the experiments, the
repro and the row are the same. They are made when the harness has written its own row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.check.model import BenchmarkRunner
from hashbench.integrations.dynamo.phases import (
    COMPILING,
    EagerRuns,
    counting,
    named_results,
    optimizer_arguments,
    step_of,
)
from hashbench.integrations.dynamo.session import Session, amend_note
from hashbench.records import DTYPES, Failure, ModelSpec, Row, RunCounts, RunOptions, Trace
from hashbench.results.folder import file_key
from hashbench.run import outputs
from hashbench.run.outcome import Outcome, Run
from hashbench.run.workload import Workload
from hashbench.trace.api import HashDebugTrace

PAIRS_ON_DEMAND = 3
"""Own pairs that look for a difference which the harness has seen."""
_TIME_SHARE = 0.7
"""Part of what is left of the harness's ``--timeout`` that the diagnosis may take. A child that is ended then has two
rows in the harness's CSV, which the harness's own tools take for none."""
_CONFIRMING_RUNS = 12
"""Runs, in times of a traced one, that must fit in before looking for a cause makes sense."""


class HarnessRunner(BenchmarkRunner):
    """Makes a run of the harness's model exactly as the harness does, within the settings that the harness has set."""

    fresh_target = "hashbench.integrations.dynamo.fresh:FreshHarness"

    def __init__(self, options: RunOptions, harness: Any, names: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.harness, self.names = harness, names

    def deepcopy_model(self, module: torch.nn.Module) -> torch.nn.Module:
        """The harness's copy."""
        copied: torch.nn.Module = self.harness.deepcopy_and_maybe_parallelize(module)
        return copied

    def init_optimizer(
        self,
        workload: Workload,  # noqa: ARG002
        model: torch.nn.Module,
        name: str = "",  # noqa: ARG002
    ) -> torch.optim.Optimizer | None:
        """The harness's optimizer; none on the CPU."""
        self.harness.init_optimizer(*optimizer_arguments(self.names, model))
        chosen: torch.optim.Optimizer | None = getattr(self.harness, "optimizer", None)
        return chosen

    def fresh_inputs(self, workload: Workload) -> Any:
        """The harness's clones."""
        return self.names["clone_inputs"](workload.inputs)

    def run_n_iterations(
        self,
        workload: Workload,  # noqa: ARG002
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,  # noqa: ARG002
        trace: HashDebugTrace | None,
    ) -> dict[str, Any]:
        """The harness's iterations, and what the harness compares: the results of the last one."""
        with trace if trace is not None else nullcontext():
            found = self.harness.run_n_iterations(model, inputs, *counting(step_of(self.harness), trace))
        named = named_results(found)
        if trace is not None:
            for name, value in named.items():
                trace.add_result(name, value)
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in named.items()}

    def traces(self, workload: Workload, *, runs: int) -> list[Trace | Failure]:
        """The traces of so many runs."""
        made = [self._attempt(workload, "") for _ in range(runs)]
        found = (run if isinstance(run, Failure) else run.trace for run in made)
        return [outcome for outcome in found if outcome is not None]

    def pair(self, workload: Workload, outcome: Outcome) -> Outcome:
        """One more pair of traced runs, compared."""
        first, second = (self._attempt(workload, "") for _ in range(2))
        if isinstance(first, Failure) or isinstance(second, Failure):
            return replace(outcome, confirmed="no: a further run failed")
        return self.compared(outcome, first, second)

    def compared(self, outcome: Outcome, first: Run, second: Run) -> Outcome:
        """The outcome of two runs, as in a sweep."""
        with _disable_current_modes(), torch.no_grad():
            found = self._compare(outcome, first, second, 2)
        differ = int(found.accuracy != "pass")
        return replace(found, run_counts=RunCounts(1, differ, 1 + differ))

    def explained(self, workload: Workload, outcome: Outcome, spec: ModelSpec) -> Outcome:
        """The outcome with what confirming pairs and experiments say."""
        return self._diagnose(workload, self._confirm(workload, outcome, ""), "", spec)

    def row(self, spec: ModelSpec, outcome: Outcome, workload: Workload, *, seconds: float) -> Row:
        """The row, as in a sweep; traces of runs that differ are kept."""
        return self._row(spec, outcome, workload.iterations, seconds=seconds)


class Subject:
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
        self.runner = HarnessRunner(self.options, harness, names)
        self.model, self.inputs = model, inputs
        self.eager = EagerRuns(harness, names, model=model, inputs=inputs, traced=session.trace == "always")
        self.eager.on_compared = self._look
        self.outcome = Outcome("pass", _level())
        amend_note(session, name, device=self.options.device, mode=self.options.mode)

    def _look(self, one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
        """While the harness still holds both results: how they differ, in numbers."""
        if len(self.eager.runs) == 2:
            runs = [replace(run, results=found) for run, found in zip(self.eager.runs, (one, two), strict=True)]
            self.outcome = self.runner.compared(self._begun(), *runs)
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
            workload = Workload(module=model, inputs=inputs, iterations=self.harness.args.iterations)
            outcome, error = self._happened(workload, status)
            if outcome.accuracy == "eager_two_runs_differ":
                outcome = self._explained(workload, outcome)
        row = self.runner.row(self.spec, outcome, workload, seconds=time.perf_counter() - self.began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))

    def _happened(self, workload: Workload, status: str) -> tuple[Outcome, str]:
        """What became of the two eager runs, and words for where that is not what the harness wrote."""
        eager = self.eager
        if eager.phase == 0:
            return replace(self.outcome, accuracy="pass_due_to_skip"), "the harness ran no eager pair"
        if eager.phase < COMPILING and status.startswith(("eager_1st_run", "eager_2nd_run")):
            return replace(self.outcome, accuracy=status, failure=eager.failure, runs=eager.phase), ""
        if eager.compare_error:
            return self._not_compared()
        outcome = self.outcome if eager.answer is not None else self._unasked(workload)
        if eager.answer is False and outcome.difference is None:
            return outcome, "same() of the harness said no to two runs of equal bits (a NaN equals nothing there)"
        if outcome.accuracy == "eager_two_runs_differ" and outcome.verdict is None:
            outcome = self._found_again(workload, outcome)
        return outcome, _harness_word(status, outcome)

    def _not_compared(self) -> tuple[Outcome, str]:
        said = f"same() of the harness raised {self.eager.compare_error}"
        outcome = replace(self.outcome, accuracy="results_not_comparable", failure=Failure(said))
        if len(self.eager.runs) != 2:
            return outcome, ""
        found = self.runner.compared(replace(self._begun(), accuracy="pass"), *self.eager.runs)
        if not self.eager.runs[0].results:
            return replace(outcome, ops=found.ops, runs=2), ""
        agree = "agree" if found.accuracy == "pass" else "do not agree"
        return (
            replace(found, accuracy="results_not_comparable", failure=Failure(said), difference=None),
            f"bit by bit the two runs {agree}",
        )

    def _unasked(self, workload: Workload) -> Outcome:
        """The harness made both runs and did not compare them: its list says that they differ."""
        if len(self.eager.runs) == 2:
            return self.runner.compared(self._begun(), *self.eager.runs)
        return self.runner.pair(workload, replace(self.outcome, runs=2))

    def _found_again(self, workload: Workload, outcome: Outcome) -> Outcome:
        """A difference of two runs that were not traced, in further pairs that are."""
        for _ in range(PAIRS_ON_DEMAND):
            found = self.runner.pair(workload, replace(outcome, accuracy="pass"))
            if found.accuracy != "pass":
                return found
        return replace(outcome, confirmed=f"no: {PAIRS_ON_DEMAND} further pairs agreed")

    def _explained(self, workload: Workload, outcome: Outcome) -> Outcome:
        left = _TIME_SHARE * (float(getattr(self.harness.args, "timeout", 2000)) - _age())
        if self.session.budget <= 0 or left < _CONFIRMING_RUNS * (time.perf_counter() - self.began):
            why = "no experiments were asked for" if self.session.budget <= 0 else "the harness's --timeout is too near"
            return replace(outcome, confirmed=f"not tried: {why}")
        self.runner.options = replace(self.options, diagnose_budget=min(self.session.budget, left))
        return self.runner.explained(workload, outcome, self.spec)


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


def _level() -> str:
    return {0: "off", 1: "warn", 2: "on"}[torch.get_deterministic_debug_mode()]


def _age() -> float:
    """Seconds since this process began: the harness counts from there."""
    return time.time() - psutil.Process().create_time()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
