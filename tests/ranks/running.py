"""What a rank of the pool runs: a program, untraced or under a trace."""

from __future__ import annotations

from pathlib import Path

from hashbench import HashDebugTrace
from hashbench.records import Trace
from tests.ranks.programs.base import Run
from tests.ranks.programs.table import PROGRAMS


def traced(rank: int, ranks: int, name: str, planted: bool, number: int, folder: str) -> Trace:
    program = PROGRAMS[name]
    run = Run(rank, ranks, planted, number, Path(folder))
    if program.before is not None:
        program.before(run)
    with HashDebugTrace(tracer="native", source_lines=True) as trace:
        for label, value in program.run(run).items():
            trace.add_result(label, value)
    return trace.finish()
