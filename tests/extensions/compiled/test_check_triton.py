"""Models whose kernels are Triton's, swept as on a GPU: here Inductor writes them for the CPU, and Triton's interpreter
runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hashbench.core.records import Row
from hashbench.core.results.load import load_file
from hashbench.extensions.compiled import compiled_kernels
from tests.core.inductor import interpreted
from tests.extensions.compiled import interpreted_relu
from tests.flat_rows import flat

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, interpreted.NEEDS_CUDA])]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inductor")]


@pytest.fixture(scope="module", params=DEVICES)
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Row], Path]:
    pytest.importorskip("triton")
    output = tmp_path_factory.mktemp("triton")
    checkout = Path(interpreted_relu.__file__).parents[3]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hashbench", "sweep", "--suite", interpreted_relu.__file__, "--inference"),
            *("--backend", "inductor", "--jobs", "1", "--threads", "2", "--output", str(output), "-d", request.param),
        ],
        env={**interpreted.environment(request.param), "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    rows = {row.name: row for row in load_file(output / "accuracy.csv").rows}
    assert rows.keys() == {"right", "wrong"}, done.stderr[-3000:]
    return rows, output


def test_a_right_model_passes_and_its_kernels_are_judged(swept: tuple[dict[str, Row], Path]) -> None:
    rows, output = swept
    row = flat(rows["right"])
    assert (row.accuracy, row.checked, row.detail) == ("pass", 1.0, "")
    assert row.beyond_rounding < 16
    listed = compiled_kernels.read(compiled_kernels.path_in(output, suite=row.suite, name="right", mode="inference"))
    (relu,) = [kernel for kernel in listed.kernels if kernel.name.startswith("triton_") and "relu" in kernel.name]
    assert "aten.relu.default" in relu.ops
    assert re.fullmatch(r"XBLOCK \d+, \d+ warps?, \d+ stages?", relu.launch)


def test_a_planted_mistake_is_named_at_its_kernel_and_op_and_reproduced(swept: tuple[dict[str, Row], Path]) -> None:
    rows, output = swept
    row, found = rows["wrong"], flat(rows["wrong"])
    assert (row.accuracy, found.stage, found.op) == ("fail_accuracy", "codegen", "aten.relu.default")
    assert row.kernel.startswith("triton_poi_fused_")
    assert "relu" in row.kernel
    assert row.source.endswith("self.b((self.a(x) * 1.5).relu())")
    assert (row.confidence, found.semantic) == ("proven", "yes")
    assert row.reproduced.startswith("in a fresh process ")
    assert "XBLOCK" in (output / row.repro / "repro.py").read_text(encoding="utf-8")
    assert f"def {row.kernel}(" in (output / row.repro / "kernel.py").read_text(encoding="utf-8")
