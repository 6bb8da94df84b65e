"""HashDebugTrace: log files, printing, queries, entering, iterations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.errors import HashbenchError
from hashbench.core.trace import file
from tests.core.trace.mode_helpers import iterations, ops, record, trained, value

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_nested_trace_is_refused_outer_goes_on() -> None:
    with HashDebugTrace() as trace:
        with pytest.raises(HashbenchError, match="cannot nest traces"), HashDebugTrace():
            pass
        torch.ones(2) + 1
    assert ops(trace) == ["ones", "add"]


def test_finished_trace_cannot_be_reentered() -> None:
    with HashDebugTrace() as trace:
        torch.ones(2)
    trace.finish()
    with pytest.raises(HashbenchError, match="finished"), trace:
        pass


def _example(**options: Any) -> HashDebugTrace:
    with HashDebugTrace(**options) as trace:
        x = torch.ones(3) * 2
        assert (trace.is_active(), trace.stats["total_ops"]) == (True, 2)
        (x + x).sum().item()
    return trace


def test_log_is_written_on_exit(tmp_path: Path) -> None:
    trace = _example(log_path=tmp_path / "logs" / "a.log", include_timestamp=True, show_exec_time=True)
    text = (tmp_path / "logs" / "a.log").read_text()
    assert file.read(tmp_path / "logs" / "a.log") == trace.finish()
    assert len(re.findall(r"; time=\d+\.\d+ seconds=\d+\.\d+$", text, re.MULTILINE)) == len(trace.finish().records)


def test_log_is_written_on_exception(tmp_path: Path) -> None:
    def body() -> None:
        with HashDebugTrace(log_path=tmp_path / "a.log"):
            torch.ones(3) @ torch.ones(4)

    with pytest.raises(RuntimeError):
        body()
    assert ops(file.read(tmp_path / "a.log")) == ["ones", "ones"]


@pytest.mark.parametrize(("limit", "lines"), [(None, 5), (2, 2), (0, 0)])
def test_verbose_prints_up_to_the_limit(limit: int | None, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _example(verbose=True, max_ops_logged=limit)
    assert len(capsys.readouterr().out.splitlines()) == lines
    assert len(trace.finish().records) == 5


def test_queries_of_the_ancestor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _example()
    stats = trace.stats
    assert (stats["total_ops"], stats["tensor_ops"], len(stats["unique_tensors"])) == (5, 5, 4)
    assert stats["operation_types"]["aten.add.Tensor"] == 1
    trace.print_summary()
    assert capsys.readouterr().out.startswith("5 ops, 4 different tensors\n")
    trace.log_path = tmp_path / "a.log"
    trace.print_summary(to_file=True)
    assert not capsys.readouterr().out
    assert (tmp_path / "a.log.summary").read_text().startswith("5 ops, 4 different tensors\n")
    assert trace.find_tensor_by_hash("") == []
    flow = trace.get_tensor_flow_graph()
    assert flow[2]["inputs"] == [flow[1]["op_id"]] * 2
    doubled = value(torch.full((3,), 2.0))
    assert [(found["operation"], found["role"]) for found in trace.find_tensor_by_hash(doubled)] == [
        ("aten.mul.Tensor", "output"),
        ("aten.add.Tensor", "input"),
    ]
    trace.export_to_json(tmp_path / "a.json")
    assert len(json.loads((tmp_path / "a.json").read_text())["records"]) == 5


def test_stack_log_names_each_argument() -> None:
    log = _example().stack_log
    assert [entry["id"] for entry in log] == [1, 2, 3, 4, 5]
    ones, doubled = value(torch.ones(3)), value(torch.full((3,), 2.0))
    read = {entry["func"]: [one["hash"] for one in entry["arg_tensors"]] for entry in log}
    assert read["aten.mul.Tensor"] == [ones]
    assert read["aten.add.Tensor"] == [doubled, doubled]
    assert {one["shape"] for entry in log for one in entry["arg_tensors"]} == {(3,), ()}


def test_reentered_trace_knows_earlier_forward_ops() -> None:
    layer, trace = torch.nn.Linear(3, 3), HashDebugTrace()

    with trace:
        loss = layer(torch.randn(2, 3)).sum()
    with trace:
        loss.backward()

    assert record(trace, "mm").forward_op == "forward/Linear/aten.addmm.default#0"


@pytest.mark.parametrize("optimizers", [1, 2])
def test_step_overrides_counted_iterations(optimizers: int) -> None:
    trace = trained(HashDebugTrace(), 3, optimizers=optimizers, explicit=True)
    assert iterations(trace, "aten.addmm.default")[optimizers:] == [1] * optimizers + [2] * optimizers
    assert trace.records[-1].iteration == 3


def test_step_continues_from_a_set_iteration() -> None:
    trace = HashDebugTrace()
    trace.iteration = 5
    assert iterations(trained(trace, 2), "aten.addmm.default") == [5, 5]
    trace = HashDebugTrace()
    trace.iteration = 5
    assert iterations(trained(trace, 2, explicit=True), "aten.addmm.default") == [5, 6]
