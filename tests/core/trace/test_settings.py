"""What decides how kernels compute is read, also where it is no setting of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hashbench
from hashbench.core.run.settings import applied
from hashbench.core.trace.settings import glance, in_force, settings, variables


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *[(name, True) for name in ("OMP_NUM_THREADS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")],
        *[(name, True) for name in ("NVIDIA_TF32_OVERRIDE", "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE")],
        *[(name, False) for name in ("OMP_WAIT_POLICY", "MKL_VERBOSE", "ONEDNN_VERBOSE", "KMP_BLOCKTIME")],
        *[(name, False) for name in ("CUDNN_HOME", "OMP_DISPLAY_ENV", "CUDNN_LOGDEST_DBG", "MY_OMP_THREADS", "HOME")],
    ],
)
def test_variables_that_decide_how_libraries_compute(name: str, counts: bool) -> None:
    assert (name in variables({name: "1"})) == counts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("num_threads", "3"),
            ("autocast_cpu", "True"),
            ("deterministic_algorithms", "on"),
            ("flush_denormal", "True"),
        ],
        *[("default_dtype", "torch.float64"), ("float32_matmul_precision", "high"), ("cudnn.deterministic", "True")],
        *[("mkldnn.deterministic", "True"), ("mkldnn.enabled", "False"), ("mkldnn.conv.fp32_precision", "bf16")],
    ],
)
def test_a_glance_shows_what_changed(name: str, value: str) -> None:
    before = glance()
    with applied({name: value}):
        assert settings()[name] == value
        assert glance() != before
    assert glance() == before


@pytest.mark.parametrize(("given", "labels"), [(None, ["start"]), (settings, ["start", "end"])])
def test_a_trace_holds_settings(given: Callable[[], dict[str, str]] | None, labels: list[str]) -> None:
    with hashbench.HashDebugTrace(settings=given) as trace:
        torch.ones(1) + 1
    assert [mark.label for mark in trace.finish().marks] == labels
    assert ("cpu_capability" in dict(trace.finish().marks[0].settings)) == (given is None)
    assert {"num_threads", "interop_threads", "cpu_capability", "autocast_cpu"} <= in_force().keys()


def test_a_setting_is_named_before_a_kernel() -> None:
    """Without settings of its own, a trace of another number of threads would blame the kernel."""
    traces = []
    for threads in (1, 3):
        with applied({"num_threads": str(threads)}), hashbench.HashDebugTrace() as trace:
            result = torch.ops.aten.add(torch.ones(2), 1, alpha=threads)
        trace.add_result("result", result)
        traces.append(trace.finish())
    found = hashbench.find_divergence(*traces).divergence
    assert found is not None
    assert (found.origin, found.first, found.second) == ("settings", "num_threads=1", "num_threads=3")
