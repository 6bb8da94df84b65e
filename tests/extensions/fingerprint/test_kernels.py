"""Remarks on the kernels that changed between two sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.core.records import Row
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.document import Fingerprints, ModelFingerprint
from hashbench.extensions.fingerprint.kernels import kernel_remarks
from tests.extensions.fingerprint.fingerprints import NET, NEW, OLD, OTHER_MM, PICK

ROW = Row("cpu", "net", 1, "pass", suite="zoo", mode="inference", dtype="float32")


def folder(path: Path, row: Row, model: ModelFingerprint | None, environment: dict[str, object]) -> Path:
    """A results folder with one row and one fingerprint, or none."""
    path.mkdir()
    header = "dev,name,batch_size,accuracy,suite,mode,dtype,origin,kernel"
    cells = [row.dev, row.name, "1", row.accuracy, row.suite, row.mode, row.dtype, row.origin, row.kernel]
    (path / "accuracy.csv").write_text(f"{header}\n{','.join(cells)}\n", encoding="utf-8")
    if model is not None:
        document.write(document.path_in(path, NET.key), Fingerprints(environment, (model,)))
    return path / "accuracy.csv"


DIFFERS = replace(ROW, accuracy="eager_two_runs_differ", origin="kernel", kernel="aten.mm.default")


def remarks(tmp_path: Path, after: Row, new: ModelFingerprint | None) -> list[str]:
    files = [folder(tmp_path / "old", ROW, NET, OLD), folder(tmp_path / "new", after, new, NEW)]
    if new is None:
        (tmp_path / "new" / document.FOLDER).mkdir()
    return list(kernel_remarks([(ROW, after), (None, after)], base=files[:1], new=files[1:]))


def test_flipped_row_names_changed_kernels(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, replace(NET, kernels=(OTHER_MM, PICK))) == [
        "net (inference): 1 of 2 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL)."
    ]


def test_flipped_row_says_that_no_kernel_changed(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, NET) == [
        "net (inference): none of 2 kernels changed with torch 2.15.0 -> 2.15.1."
    ]


def test_equal_row_has_no_remark(tmp_path: Path) -> None:
    assert remarks(tmp_path, ROW, replace(NET, kernels=(OTHER_MM, PICK))) == []


def test_missing_fingerprint_is_named(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, None) == ["net (inference): it has no kernel fingerprint in NEW."]


def test_fingerprint_of_another_model_is_not_used(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, replace(NET, name="other")) == [
        "net (inference): its kernel fingerprint cannot be used (it is of another model)."
    ]


def test_compare_shows_the_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remarks(tmp_path, DIFFERS, replace(NET, kernels=(OTHER_MM, PICK)))

    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "net (inference): 1 of 2 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL)." in said
