"""The repro of a generated kernel: its C++ lies beside, its script compiles it, and nothing of ours ever does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repro_helpers import PLACE, document_in, said_of, signed_again

from hashbench import cli
from hashbench.core.diagnose.calls.call import CapturedCall, Slot, TensorForm
from hashbench.core.diagnose.repro import call_file, write_repro
from hashbench.core.diagnose.repro.call_arguments import BadCallError, check_kernel_arguments
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import new_python
from tests.core.diagnose.repro.writing import REPEAT, differs, ran, written
from tests.kernel_helpers import (
    SOURCE,
    TRITON,
    TRITON_CONFIG,
    FakeKernel,
    Scatter,
    added,
    call_of,
    captured_kernel,
    triton_kernel,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "repro", call_of(FakeKernel(added)), REPEAT)


def test_folder_has_the_source_beside_the_tensors(folder: Path) -> None:
    assert (folder / "kernel.cpp").read_text() == SOURCE
    script = (folder / "repro.py").read_text()
    ast.parse(script)
    assert 'TYPES = ["const float*", "float*"]\n' in script
    assert "kernel = AsyncCompile().cpp_pybinding(TYPES, source)  # cpp_fused_fake_0\n" in script
    assert "out = kernel(t[0], t[1])\n" in script
    assert "It needs torch and a C++ compiler." in script
    report = (folder / "REPORT.md").read_text()
    assert "`tensors.pt` and `kernel.cpp`" in report
    assert "hashbench replay" not in report


def test_a_triton_kernel_is_run_with_the_configuration_that_it_had(tmp_path: Path) -> None:
    call = call_of(triton_kernel())
    folder = written(tmp_path / "repro", call, REPEAT)
    script, report = ((folder / name).read_text() for name in ("repro.py", "REPORT.md"))
    assert (folder / "kernel.py").read_text() == TRITON
    assert not (folder / "kernel.cpp").exists()
    assert f"autotuner.configs = [{TRITON_CONFIG}]" in script
    assert "It needs torch with Triton, whose interpreter runs the kernel." in script
    assert "`tensors.pt` and `kernel.py`" in report
    saved = call_file.read_checked(folder).call
    assert (saved.args, saved.func.plan.written, saved.func.types) == (call.args, (1,), ("*fp32", "*fp32"))


def test_without_a_known_configuration_autotuning_chooses_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", call_of(replace(triton_kernel(), config="")), REPEAT)
    assert "autotuner.configs" not in (folder / "repro.py").read_text()


@pytest.mark.slow
def test_a_triton_kernel_is_called_again_by_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folder = written(tmp_path / "repro", call_of(triton_kernel()), REPEAT)
    script = (folder / "repro.py").read_text()
    (folder / "repro.py").write_text(script.replace("sys.exit(1 if", "print(first[-1].tolist())\nsys.exit(1 if"))
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    finished = new_python(code, str(folder / "repro.py"), seconds=600)
    assert finished.status == 0, finished.stderr[-2000:]
    ((first, second),) = re.findall(r"^\[(.*), (.*)\]$", finished.stdout, re.MULTILINE)
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))  # as ``call_of`` has them
    assert [float(first), float(second)] == (values[:2] + 4096).tolist()


@pytest.mark.parametrize("filled", [(1,), ()])
def test_script_poisons_what_the_kernel_is_to_fill(filled: tuple[int, ...], tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", call_of(FakeKernel(added, filled=filled)), replace(REPEAT, name="poison"))
    script = (folder / "repro.py").read_text()
    ast.parse(script)
    assert ("for place in [1]:" in script) == ("(t[place].nbytes,), byte, " in script) == bool(filled)


def test_call_is_read_back_as_it_was(tmp_path: Path) -> None:
    call = call_of(FakeKernel(added))
    saved = call_file.read_checked(written(tmp_path / "repro", call, REPEAT)).call
    assert (saved.op, saved.args, saved.tensors) == (call.op, call.args, call.tensors)
    assert (saved.func.plan.written, saved.func.types, saved.func.source) == ((1,), ("const float*", "float*"), SOURCE)
    with pytest.raises(NotImplementedError):
        saved.func.plan.call()


@pytest.mark.slow
def test_replay_says_in_one_line_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"hashbench: cannot replay {folder}: nothing was run (cpp_fused_fake_0 is code in the folder, and no code of a "
        "folder is run). If you trust the folder, run its repro.py."
    )


def test_source_that_is_gone_is_no_repro(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match=r"the source of its kernel is gone"):
        write_repro(tmp_path / "repro", call_of(FakeKernel(added, source="")), said_of(REPEAT))
    assert not (tmp_path / "repro").exists()


def test_folder_of_an_op_has_no_kernel(tmp_path: Path) -> None:
    from repro_helpers import aten, captured

    folder = written(tmp_path / "repro", captured(aten.sum.default, torch.randn(9)), REPEAT)
    assert "kernel" not in document_in(folder)
    assert not (folder / "kernel.cpp").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": {"types": ["const float*"], "sha256": None}}, "cpp_fused_fake_0 takes 1 arguments"),
        ({"kernel": {"types": ["const float*", "int64_t"], "sha256": None}}, "is not a int64_t"),
        ({"kernel": {"types": ["const float*", "float*"], "sha256": "0"}}, "kernel.cpp is truncated, changed"),
        ({"kernel": None}, "is not the name of an op"),
        ({"op": "../evil"}, "is not the name of a kernel"),
        ({"kwargs": {"out": {"tensor": 0}}}, "has no such arguments"),
        ({"args": [{"tensor": 0}, {"tensor": 9}]}, "tensor is 9"),
    ],
)
def test_forged_folder_is_refused(folder: Path, change: dict[str, Any], said: str) -> None:
    found = document_in(folder)
    entry = change.get("kernel")
    if entry and entry["sha256"] is None:
        change = {"kernel": {**entry, "sha256": found["kernel"]["sha256"]}}
    signed_again(folder, {**found, **change})
    with pytest.raises(HashbenchError, match="nothing was run") as raised:
        call_file.read(folder)
    assert said in str(raised.value)


def test_missing_source_is_said(folder: Path) -> None:
    (folder / "kernel.cpp").unlink()
    with pytest.raises(HashbenchError, match=r"kernel\.cpp: No such file"):
        call_file.read(folder)


FORM = TensorForm(0, torch.float32, (2,), (1,))


@pytest.mark.parametrize(
    ("kind", "value", "taken"),
    [
        ("const float*", Slot(0), True),
        ("c10::complex<float>*", Slot(0), True),
        ("const float*", 3, False),
        ("const float*", Slot(1), False),  # a sparse tensor has no address
        ("const int64_t", 3, True),
        ("const int64_t", Slot(0), False),
        ("const int64_t", "3", False),
        ("std::string", 3, False),
    ],
)
def test_arguments_fit_their_types(kind: str, value: Any, taken: bool) -> None:
    tensors = (FORM, torch.eye(2).to_sparse())
    if taken:
        check_kernel_arguments("kernel", (kind,), (value,), tensors)
    else:
        with pytest.raises(BadCallError):
            check_kernel_arguments("kernel", (kind,), (value,), tensors)


# ------------------------------------------------------------------------------------------ a kernel of the compiler


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[bool, CapturedCall]]:
    """The kernel that adds in any order, for eight threads, and its twin that adds nothing."""
    inductor = pytest.importorskip("torch._inductor.config")
    with inductor.patch({"cpp.threads": 8}):
        yield {
            accumulate: replace(captured_kernel(Scatter(accumulate=accumulate), torch.ones(())), **PLACE)
            for accumulate in (True, False)
        }
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "accumulate",
    [pytest.param(True, id="race"), pytest.param(False, id="twin", marks=pytest.mark.exhaustive)],
)
def test_script_compiles_and_repeats(kernels: dict[bool, CapturedCall], accumulate: bool, tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", kernels[accumulate], REPEAT)
    assert "#pragma omp parallel num_threads(8)" in (folder / "kernel.cpp").read_text()
    assert differs(ran(folder)) == accumulate
    assert "calls differ from the first" in (folder / "REPORT.md").read_text()
