"""Rows of compiled models."""

from __future__ import annotations

from tests.core.report.rows import PLAIN
from tests.experiment_texts import evidence
from tests.flat_rows import changed

INACCURATE = changed(
    PLAIN,
    **{"accuracy": "fail_accuracy", "backend": "inductor", "stage": "codegen", "kernel": "cpp_fused_relu_0"},
    **{"op": "aten.relu.default", "module": "Net.act", "source": "net.py:18 forward", "phase": "forward"},
    **{"rate": 0.0, "trials": 1, "rate_of": "runs", "rate_high": 0.95, "traces": "traces/a.log.gz traces/b.log.gz"},
    **{"beyond_rounding": 2.2e7, "eager_rounding": 0.5, "semantic": "yes", "confidence": "proven"},
    **{"differing_results": "loss.1", "detail": "buf1 is 0.48 off", "cured_by": "aten.relu.default runs eagerly"},
    **{"graphs": 1, "graph_breaks": 0, "kernels": 16, "checked": 0.9, "compile_seconds": 7.8},
    evidence=evidence("compilation/scalar_code 1/1", "compilation/eager_op 0/1", "compilation/no_fusion (budget)"),
    advice="report the code generated for aten.relu.default",
)
"""A compiled model with a wrong kernel."""
ROUNDED = changed(
    INACCURATE,
    **{"stage": "rounding", "kernel": "", "source": "", "cured_by": "", "semantic": "no", "beyond_rounding": 1.5},
    **{"op": "aten.sub.Tensor", "detail": "rounding, amplified by aten.sub.Tensor"},
)
"""A compiled model that is inaccurate by rounding alone."""
WHY = (
    "buf1 is 0.48 off; beyond the tolerance: loss.1; 2.2e+07x the rounding bound (eager mode 0.5); "
    "in float64 too: a mistake, not rounding; fixed by: aten.relu.default runs eagerly (1 of 2 compilations)"
)
