"""The runs that a verdict is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.extensions.watch.program.looks import ProgramLooks, RunRequest
from hashbench.extensions.watch.program.task import Program

LOOP = """
import torch
values = torch.ones(8)
for _ in range(20000):
    values = values * 0.999
print(values.sum().item())
"""


@pytest.mark.slow
def test_a_trace_is_bounded_and_its_begin_is_compared(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    request = RunRequest(Program(str(tmp_path / "loop.py")), most=300)
    verdict = ProgramLooks(request, tmp_path / "runs").verdict()
    ends = [run.end for run in (verdict.lead.first, verdict.lead.second)]
    assert [end.bounded for end in ends if end is not None] == [True, True]
    assert (verdict.differs, verdict.lead.kernels) == (False, 300)
