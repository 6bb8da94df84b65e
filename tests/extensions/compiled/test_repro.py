"""The repro of a kernel whose results rounding does not explain: a script that prints the ratio."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Finished, new_python
from hashbench.core.run.rounding import LIMIT
from hashbench.extensions.compiled.repro import BlamedCall, ExpectedResult, write_accuracy_repro
from tests.kernel_helpers import FakeKernel, Scatter, added, call_of, captured_kernel, triton_kernel

aten: Any = torch.ops.aten


def blamed(**changes: Any) -> BlamedCall:
    call = call_of(FakeKernel(added, filled=(1,)))
    one = torch.zeros(2, dtype=torch.float64)
    found = ExpectedResult("buf'1", 1, one, one + 1, eager=0.84)
    return replace(BlamedCall(call, (found,), stage="codegen"), **changes)


def done(folder: Path) -> Finished:
    code = "import runpy, sys; sys.path[:0] = []; runpy.run_path(sys.argv[1], run_name='__main__')"
    return new_python(code, str(folder / "repro.py"), seconds=600)


def ratio_of(finished: Finished) -> float:
    found = re.search(r"largest ratio (\S+), limit 16", finished.stdout)
    assert found is not None, finished
    return float(found[1])


def test_script_says_what_is_wrong_in_its_first_lines(tmp_path: Path) -> None:
    case = blamed(op="aten.mm.default", semantic="yes")
    write_accuracy_repro(tmp_path / "repro", case, seen_in="in the model net")
    said = " ".join((ast.get_docstring(ast.parse((tmp_path / "repro" / "repro.py").read_text())) or "").split())
    assert said.startswith(f"{case.call.op} gives results that rounding does not explain.")
    assert "in the model net" in said.lower()
    assert "It computes aten.mm.default. Stage of the compiler: codegen." in said
    assert "The mistake also shows in float64: yes." in said
    assert "It needs torch and a C++ compiler." in said
    assert (torch.load(tmp_path / "repro" / "tensors.pt", weights_only=True)["references"][0].dtype) is torch.float64


def test_folder_has_the_source_of_the_kernel(tmp_path: Path) -> None:
    write_accuracy_repro(tmp_path / "repro", blamed())
    text = (tmp_path / "repro" / "repro.py").read_text()
    ast.parse(text)
    assert '    ("buf\'1", 1, 0.84),\n' in text
    assert "out = kernel(t[0], t[1])\n" in text
    assert "for place in [1]:" in text
    assert {path.name for path in (tmp_path / "repro").iterdir()} == {"repro.py", "tensors.pt", "kernel.cpp"}


@pytest.mark.slow
def test_a_kernel_for_a_device_that_is_not_there_is_interpreted_by_hashbench(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    kernel: Any = triton_kernel()
    kernel.kernel = SimpleNamespace(refused="", triton_meta={"device": SimpleNamespace(cc=90)})
    call = call_of(kernel)
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))  # as ``call_of`` has them
    right = (values[:2] + 100).double()  # the kernel adds its block size, that of four elements
    found = ExpectedResult("buf0", 1, right, torch.ones_like(right))
    write_accuracy_repro(tmp_path / "repro", BlamedCall(call, (found,)))
    script = (tmp_path / "repro" / "repro.py").read_text()
    assert "It needs hashbench and Triton: kernel.py was made for cuda:90, and is interpreted." in script
    finished = done(tmp_path / "repro")
    assert finished.status == 1, finished.stderr[-2000:]
    assert ratio_of(finished) == pytest.approx(96, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"call": call_of(aten.add.Tensor)}, "the source of its kernel is gone"),
        (
            {"results": (ExpectedResult("x", 0, torch.ones(2), torch.ones(3)),)},
            "different shape than its allowed error",
        ),
    ],
)
def test_what_cannot_be_repeated_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(HashbenchError) as raised:
        write_accuracy_repro(tmp_path / "repro", blamed(**changes))
    assert said in str(raised.value)
    assert not (tmp_path / "repro").exists()


def test_result_that_is_no_argument_is_refused(tmp_path: Path) -> None:
    one = torch.ones(2, dtype=torch.float64)
    kernel = BlamedCall(call_of(FakeKernel(added)), (ExpectedResult("buf0", 7, one, one),))
    with pytest.raises(HashbenchError, match="buf0 is no argument of the kernel"):
        write_accuracy_repro(tmp_path / "repro", kernel)


@pytest.mark.slow
def test_replay_refuses_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_accuracy_repro(tmp_path / "repro", blamed())
    assert cli.main(["replay", str(tmp_path / "repro")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


SPECIAL = {
    "equal NaN": ([math.nan, 1.0], [math.nan, 1.0], 0),
    "NaN where a number belongs": ([math.nan, 1.0], [2.0, 1.0], 1),
    "a number where NaN belongs": ([2.0, 1.0], [math.nan, 1.0], 1),
    "equal infinities": ([math.inf, 1.0], [math.inf, 1.0], 0),
    "infinities of other signs": ([math.inf, 1.0], [-math.inf, 1.0], 1),
    "zeros of other signs": ([0.0, 1.0], [-0.0, 1.0], 0),
}


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The function of a script."""
    folder = tmp_path_factory.mktemp("repro") / "repro"
    write_accuracy_repro(folder, blamed())
    parsed = ast.parse((folder / "repro.py").read_text())
    (function,) = (one for one in parsed.body if isinstance(one, ast.FunctionDef) and one.name == "ratios")
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), "repro.py", "exec"), names)
    return names["ratios"]


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_have_a_ratio(name: str, ratios: Any) -> None:
    value, reference, beyond = SPECIAL[name]
    exact = torch.tensor(reference, dtype=torch.float64)
    assert bool(ratios(torch.tensor(value), exact, torch.full((2,), 1e-7).double()).max() > LIMIT) == beyond


def test_integers_have_no_rounding(ratios: Any) -> None:
    nothing = torch.zeros(1, dtype=torch.float64)
    assert [ratios(torch.tensor([3]), torch.tensor([one]), nothing).item() for one in (3, 4)] == [0.0, math.inf]


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted", [pytest.param(False, id="right", marks=pytest.mark.exhaustive), pytest.param(True, id="planted")]
)
def test_kernel_of_the_compiler_is_compiled_and_judged(planted: bool, tmp_path: Path) -> None:
    model, x = Scatter(accumulate=False), torch.full((), 0.5)
    try:
        call = captured_kernel(model, x)
    finally:
        torch._dynamo.reset()
    exact = torch.nn.functional.gelu(model.weight.detach().double() * 0.5) * 2
    allowed = exact.abs() * 2**-22 + 2**-24
    written = call.func.plan.written[0]
    expected = ExpectedResult("buf0", written, exact * (1 + 1e-3 * planted), allowed, eager=0.84)
    write_accuracy_repro(tmp_path / "repro", BlamedCall(call, (expected,)))
    finished = done(tmp_path / "repro")
    assert finished.status == int(planted), finished
    assert (ratio_of(finished) > 100) == planted
    assert "buf0: " in finished.stdout
    assert "(eager mode: 0.84)" in finished.stdout
    assert "float64: " in finished.stdout
