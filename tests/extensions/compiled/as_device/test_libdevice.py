"""Functions of libdevice against those of Python's library."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hashbench.extensions.compiled.as_device import libdevice

pytest.importorskip("triton")

VALUES = [-2.5, -0.75, -0.0, 0.25, 0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("symbol", "exact"),
    [
        ("__nv_erff", math.erf),
        ("__nv_erf", math.erf),
        ("__nv_expm1f", math.expm1),
        ("__nv_tanhf", math.tanh),
        ("__nv_fast_tanhf", math.tanh),
        ("__nv_nearbyintf", round),
        ("__nv_llrintf", round),
        ("__nv_truncf", math.trunc),
        ("__nv_signbitf", lambda value: math.copysign(1, value) < 0),
        ("__nv_isnanf", math.isnan),
        ("__nv_finitef", math.isfinite),
        ("__nv_tgammaf", math.gamma),
    ],
)
def test_computed_as_by_name(symbol: str, exact: object) -> None:
    values = [value for value in VALUES if value > 0] if "gamma" in symbol else VALUES
    kind = np.float32 if symbol.endswith("f") and symbol != "__nv_erf" else np.float64
    found = libdevice.computed(symbol, [np.array(values, kind)])
    assert found.tolist() == pytest.approx([exact(value) for value in values], rel=1e-6)  # type: ignore[operator]


def test_two_operands() -> None:
    found = libdevice.computed("__nv_powf", [np.array([[2.0, 3.0]], np.float32), np.array([[3.0, 2.0]], np.float32)])
    assert found.tolist() == [[8.0, 9.0]]
    assert found.dtype == np.float32


def test_unknown_function_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"libdevice\.no_such_f"):
        libdevice.computed("__nv_no_such_f", [np.zeros(1)])


def test_all_that_inductor_calls_are_known() -> None:
    """Those that its kernels name; ``nextafterf`` lies in a helper for another dtype."""
    import inspect
    import re

    from torch._inductor.codegen import triton as codegen

    called = set(re.findall(r"libdevice\.(\w+)\(", inspect.getsource(codegen))) - {"rint"}
    unknown = {name for name in called if name not in libdevice.FUNCTIONS and name[:-1] not in libdevice.FUNCTIONS}
    assert not unknown
