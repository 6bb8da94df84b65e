"""Diagnose the difference that entered on one rank: that rank leads, and its peers make each run with it.

The leader runs the experiments of :mod:`hashbench.core.diagnose.driver`. What it changes (one thread, a clock, a
generator) it changes on itself, where the difference entered. Before each run it says in a store, which takes no
collective, how the run is to be made; its peers make the same run and forget it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hashbench.core.diagnose import driver
from hashbench.core.diagnose.rank_processes import Peers
from hashbench.core.io import from_json, read_json, replace_file, to_json
from hashbench.core.records import Diagnosis, Failure, Trace
from hashbench.core.run.outcome import Given, Outcome, Run, RunMaker
from hashbench.extensions.ranks.contributions import ContributionWatcher, save
from hashbench.extensions.ranks.runs import RankRunMaker, RankRuns

_STOP = "stop"
_PATIENCE = timedelta(days=7)
"""How long a peer waits for the next run: until it is killed with the worker."""


@dataclass(frozen=True, slots=True)
class RankDiagnosisTask:
    """What the ranks are asked for.

    Attributes:
        leader: the rank where the difference entered.
        outcome: what is known, with the divergence on that rank.
        traces: the leader's traces of the runs that differ.
    """

    leader: int
    outcome: Outcome
    traces: tuple[Trace, ...] = ()


@dataclass(frozen=True, slots=True)
class _Command:
    """How a run is to be made; ``stop``: there is none any more."""

    word: str = "run"
    traced: bool = True
    diagnosing: bool = False


def diagnosis_path(folder: Path) -> Path:
    """Return where the leader writes the diagnosis."""
    return folder / "diagnosis.json"


def read_diagnosis(folder: Path) -> Diagnosis | None:
    """Return the diagnosis of the leader; ``None`` if it left none."""
    path = diagnosis_path(folder)
    return from_json(Diagnosis, read_json(path)) if path.exists() else None


def diagnose(peers: Peers, request: RankRuns, task: RankDiagnosisTask) -> None:
    """Entry point of a rank: lead the experiments, or follow."""
    store = peers.store("commands")
    store.set_timeout(_PATIENCE)
    maker = RankRunMaker(peers, request)
    with maker.in_force():
        if peers.rank != task.leader:
            for number in itertools.count():
                command = from_json(_Command, json.loads(store.get(f"run{number}")))
                if command.word == _STOP:
                    return
                maker(traced=command.traced, diagnosing=command.diagnosing)
        with _leading(maker, store) as attempt:
            outcome = replace(task.outcome, traces=task.traces, deterministic=request.level)
            case = driver.DiagnosisCase(attempt, request.options, outcome, spec=request.spec, with_peers=True)
            found = driver.diagnose(case)
    replace_file(diagnosis_path(peers.folder), json.dumps(to_json(found)))


@contextmanager
def _leading(maker: RankRunMaker, store: Any) -> Iterator[RunMaker]:
    """Yield what makes runs together with all peers, which follow; let them end afterwards."""
    numbers = itertools.count()

    def tell(command: _Command) -> None:
        store.set(f"run{next(numbers)}", json.dumps(to_json(command)))

    def run(given: Given | None = None, *, traced: bool = True, diagnosing: bool = False, **how: Any) -> Run | Failure:
        tell(_Command(traced=traced, diagnosing=diagnosing))
        return maker(given, traced=traced, diagnosing=diagnosing, **how)

    try:
        yield run
    finally:
        tell(_Command(_STOP))


def contribute(peers: Peers, request: RankRuns, nodes: Mapping[int, str], folder: Path) -> None:
    """Entry point of a rank: make one more run, and save what this rank contributes to a collective.

    Args:
        peers: the ranks.
        request: how runs are made.
        nodes: id of the collective's record, by rank, in the order of its group; ranks outside it are left out.
        folder: for the contributions.
    """
    watcher = ContributionWatcher(nodes.get(peers.rank, ""))
    maker = RankRunMaker(peers, request)
    with maker.in_force():
        maker(watcher=watcher)
    if watcher.call is not None:
        save(watcher.call, folder, member=list(nodes).index(peers.rank))
