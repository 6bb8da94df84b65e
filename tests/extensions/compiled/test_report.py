"""Remarks on the kernels of compiled models that differ between two sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.core.records import Row
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.compiled_kernels import CompiledProgram, ListedKernel
from hashbench.extensions.compiled.report import compilation_remarks, difference_text
from hashbench.extensions.report.expectations import assess
from tests.core.report.rows import PLAIN, write_night

ROW = Row("cpu", "net", 1, "pass", suite="zoo", mode="inference", dtype="float32")

MM = ListedKernel("extern_kernels.mm", "", ("a",), ("b",), ("aten.mm",), "fc")
RELU = ListedKernel("cpp_fused_relu_0", "s", ("b",), ("c",), ("aten.relu",), launch="XBLOCK 32, 4 warps, 1 stage")
SUM = ListedKernel("cpp_fused_sum_1", "s", ("c",), ("d",), ("aten.sum", "aten.mul", "aten.add", "aten.exp"), "head")
NET = CompiledProgram("zoo", "net", "inference", "cpu", "float32", "inductor", (MM, RELU, SUM))

OTHER_SOURCE, OTHER_BITS, OTHER_INPUTS = (
    replace(RELU, name="cpp_fused_relu_3", source="t"),
    replace(RELU, writes=("e",)),
    replace(SUM, reads=("e",), writes=("f",)),
)

TEXTS: dict[str, tuple[Sequence[ListedKernel], str]] = {
    "equal": ((MM, RELU, SUM), ""),
    "another source": (
        (MM, OTHER_SOURCE, SUM),
        "1 of 3 kernel calls has another source (first: cpp_fused_relu_3, aten.relu)",
    ),
    "other bits": (
        (MM, OTHER_BITS, OTHER_INPUTS),
        "1 of 3 kernel calls has different bits on equal inputs (first: cpp_fused_relu_0, aten.relu); "
        "the bits of 1 call were not compared (other inputs, or not recorded)",
    ),
    "other bits of an op": (
        (replace(MM, writes=("z",)), RELU, SUM),
        "1 of 3 kernel calls has different bits on equal inputs (first: extern_kernels.mm, aten.mm in fc)",
    ),
    "other bits of another configuration": (
        (MM, replace(OTHER_BITS, launch="XBLOCK 64, 1 warp, 1 stage"), SUM),
        "1 of 3 kernel calls has different bits on equal inputs (first: cpp_fused_relu_0, aten.relu, "
        "XBLOCK 32, 4 warps, 1 stage against XBLOCK 64, 1 warp, 1 stage)",
    ),
    "another source and other bits": (
        (MM, replace(OTHER_SOURCE, writes=("e",)), replace(SUM, source="t", writes=("g",))),
        "2 of 3 kernel calls have another source (first: cpp_fused_relu_3, aten.relu), 2 have different bits on equal "
        "inputs (first: cpp_fused_relu_3, aten.relu)",
    ),
    "a call more": (
        (MM, RELU, replace(SUM, name="cpp_fused_exp_1", ops=("aten.exp",)), SUM),
        "1 of 4 kernel calls (3 in BASE) has another source (first: cpp_fused_exp_1, aten.exp in head, only in NEW)",
    ),
    "a call less": (
        (MM, RELU),
        "1 of 2 kernel calls (3 in BASE) has another source (first: cpp_fused_sum_1, aten.sum, aten.mul, aten.add and "
        "1 more in head, only in BASE)",
    ),
    "no bits": (
        [replace(kernel, reads=(), writes=()) for kernel in NET.kernels],
        "the bits of no call were compared (other inputs, or not recorded)",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_difference_text(case: str) -> None:
    kernels, text = TEXTS[case]
    assert difference_text(NET, replace(NET, kernels=tuple(kernels))) == text


def test_calls_left_out_of_a_file() -> None:
    assert difference_text(NET, replace(NET, kernels=(MM, RELU), left_out=1)) == (
        "1 later kernel call of NEW is not in its file"
    )
    assert difference_text(replace(NET, kernels=(MM,), left_out=2), replace(NET, kernels=(MM,), left_out=2)) == (
        "2 later kernel calls of BASE are not in its file; 2 later kernel calls of NEW are not in its file"
    )


def test_other_backend_is_not_compared() -> None:
    other = replace(NET, backend="zoo", dtype="bfloat16")
    assert difference_text(NET, other) == (
        "its compiled kernels cannot be compared (dtype float32 → bfloat16, backend inductor → zoo)"
    )


def folder(path: Path, *programs: CompiledProgram, row: Row = ROW) -> Path:
    """A results folder with one row and files of compiled kernels."""
    path.mkdir()
    header = "dev,name,batch_size,accuracy,suite,mode,dtype"
    cells = [row.dev, row.name, "1", row.accuracy, row.suite, row.mode, row.dtype]
    (path / "accuracy.csv").write_text(f"{header}\n{','.join(cells)}\n", encoding="utf-8")
    for program in programs:
        compiled_kernels.write(path, program)
    return path / "accuracy.csv"


def remarks(tmp_path: Path, base: Sequence[CompiledProgram], new: Sequence[CompiledProgram]) -> list[str]:
    rows = {program.name: replace(ROW, name=program.name) for program in (*base, *new)}
    files = [folder(tmp_path / side, *programs) for side, programs in (("old", base), ("new", new))]
    pairs = [*((row, row) for row in rows.values()), (None, ROW), (ROW, None)]
    return list(compilation_remarks(pairs, base=files[:1], new=files[1:]))


OTHER_NET = replace(NET, kernels=(MM, OTHER_SOURCE, SUM))


def test_remarks_name_what_differs_and_count_what_is_equal(tmp_path: Path) -> None:
    same = [replace(NET, name=f"same{number}") for number in range(5)]
    assert remarks(tmp_path, [NET, *same], [OTHER_NET, *same]) == [
        "net (inference): 1 of 3 kernel calls has another source (first: cpp_fused_relu_3, aten.relu).",
        "The compiled kernels of 5 models (same0, same1, same2, same3 and 1 more) have the same sources and the same "
        "bits.",
    ]


def test_many_models_are_counted(tmp_path: Path) -> None:
    base, new = ([replace(program, name=f"net{number}") for number in range(23)] for program in (NET, OTHER_NET))
    said = remarks(tmp_path, base, new)
    assert len(said) == 21
    assert said[-1] == "The compiled kernels of 3 more models differ or cannot be compared."


def test_nothing_is_said_where_a_side_compiled_nothing(tmp_path: Path) -> None:
    assert remarks(tmp_path, [NET], []) == []


def test_missing_file_is_named(tmp_path: Path) -> None:
    other = replace(NET, name="other")
    assert remarks(tmp_path, [NET, other], [other]) == [
        "net (inference): it has no compiled kernels in NEW.",
        "The compiled kernels of 1 model (other) have the same sources and the same bits.",
    ]


def test_missing_file_of_base_is_named(tmp_path: Path) -> None:
    other = replace(NET, name="other")
    assert remarks(tmp_path, [other], [other, NET])[0] == "net (inference): it has no compiled kernels in BASE."


def test_damaged_file_and_that_of_another_model_are_not_used(tmp_path: Path) -> None:
    files = [folder(tmp_path / "old", NET), folder(tmp_path / "new", NET)]
    path = compiled_kernels.path_in(tmp_path / "new", suite="zoo", name="net", mode="inference")

    def said() -> list[str]:
        return list(compilation_remarks([(ROW, ROW)], base=files[:1], new=files[1:]))

    path.write_bytes(compiled_kernels.write(tmp_path / "third", replace(NET, name="other")).read_bytes())
    assert said() == ["net (inference): its compiled kernels cannot be compared (it is of another model)."]
    path.write_bytes(path.read_bytes()[:-20])
    assert said() == [
        "net (inference): its compiled kernels cannot be compared (it is truncated (the gzip data have no end))."
    ]


def test_compare_shows_the_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path / "old", NET)
    folder(tmp_path / "new", OTHER_NET)

    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "net (inference): 1 of 3 kernel calls has another source (first: cpp_fused_relu_3, aten.relu)." in said


def test_night_has_the_remark(tmp_path: Path) -> None:
    for label, kernels in (("2026-11-01", NET.kernels), ("2026-11-02", OTHER_NET.kernels)):
        write_night(tmp_path, label, PLAIN)
        program = replace(NET, suite=PLAIN.suite, mode=PLAIN.mode, name=PLAIN.name, kernels=kernels)
        compiled_kernels.write(tmp_path / label / f"{PLAIN.suite}_{PLAIN.mode}", program)
    (remark,) = (text for text in assess([tmp_path]).remarks if "kernel call" in text)
    assert remark.startswith(f"{PLAIN.name} ({PLAIN.mode}): 1 of 3 kernel calls has another source")
