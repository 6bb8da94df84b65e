"""Fingerprints that sweeps kept: what compare and the night's report say of rows that became other than they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.fingerprint import document
from hashbench.fingerprint.changes import changes_between, changes_text
from hashbench.fingerprint.document import Fingerprints, Kernel, ModelFingerprint
from hashbench.records import Row
from hashbench.report.kernels import kernel_remarks

MM = Kernel(
    op="aten.mm.default",
    args=({"tensor": 0}, {"tensor": 1}),
    kwargs={},
    tensors=("float32[2,3]", "float32[3,4] >=0"),
    place="forward layer",
    calls=1,
    library="MKL SGEMM",
    outputs=("float32[2,4]:aa",),
    samples=("",),
)
PICK = replace(MM, op="aten.index.Tensor", tensors=("float32[9]", "int64[2] #0"), outputs=("float32[2]:bb",))
NET = ModelFingerprint(
    suite="zoo",
    name="net",
    mode="inference",
    device="cpu",
    dtype="float32",
    deterministic="on",
    threads=2,
    kernels=(MM, PICK),
    contents=("1:eNpjZAIAAAYAAw==",),
    left_out={},
)
OLD, NEW = ({"packages": {"torch": version}} for version in ("2.15.0", "2.15.1"))
ROW = Row("cpu", "net", 1, "pass", suite="zoo", mode="inference", dtype="float32")
OTHER_MM = replace(MM, outputs=("float32[2,4]:cc",))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (NET, "none of 2 kernels changed with torch 2.15.0 -> 2.15.1"),
        (
            replace(NET, kernels=(OTHER_MM, PICK)),
            "1 of 2 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL)",
        ),
        (replace(NET, contents=("other",)), "none of 1 kernel changed with torch 2.15.0 -> 2.15.1; 1 had other inputs"),
        (
            replace(NET, deterministic="off"),
            "no kernel can be compared with torch 2.15.0 -> 2.15.1; 2 had other inputs",
        ),
    ],
)
def test_two_recordings_tell_which_kernels_changed(new: ModelFingerprint, said: str) -> None:
    assert changes_text(changes_between(NET, new), base=OLD, new=NEW) == said


def test_signatures_of_one_side_alone_are_not_compared() -> None:
    changes = changes_between(NET, replace(NET, kernels=(MM, replace(PICK, op="aten.other.default"))))

    assert (changes.same, changes.changed, changes.alone) == (1, (), 2)


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


def test_a_row_that_flipped_names_the_kernels_that_changed(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, replace(NET, kernels=(OTHER_MM, PICK))) == [
        "net (inference): 1 of 2 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL)."
    ]


def test_a_row_that_flipped_says_when_no_kernel_changed(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, NET) == [
        "net (inference): none of 2 kernels changed with torch 2.15.0 -> 2.15.1."
    ]


def test_a_row_that_is_as_it_was_says_nothing(tmp_path: Path) -> None:
    assert remarks(tmp_path, ROW, replace(NET, kernels=(OTHER_MM, PICK))) == []


def test_a_missing_fingerprint_is_never_taken_for_an_equal_one(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, None) == ["net (inference): it has no kernel fingerprint in NEW."]


def test_a_fingerprint_of_another_model_is_not_used(tmp_path: Path) -> None:
    assert remarks(tmp_path, DIFFERS, replace(NET, name="other")) == [
        "net (inference): its kernel fingerprint cannot be used (it is of another model)."
    ]


def test_compare_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remarks(tmp_path, DIFFERS, replace(NET, kernels=(OTHER_MM, PICK)))

    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "net (inference): 1 of 2 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL)." in said


@pytest.mark.slow
def test_a_sweep_keeps_the_fingerprints_of_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo, output = tmp_path / "zoo.py", tmp_path / "out"
    zoo.write_text(
        "import torch\n\n\ndef fails():\n    raise RuntimeError('never made')\n\n\n"
        "MODELS = {'small': lambda: (torch.nn.Linear(4, 3), torch.ones(2, 4)), 'fails': fails}\n",
        encoding="utf-8",
    )

    assert cli.main(["sweep", "--inference", "--suite", str(zoo), "--fingerprints", "--output", str(output)]) == 0

    capsys.readouterr()
    (path,) = (output / document.FOLDER).iterdir()
    recorded = document.read(path)
    assert recorded.models[0].key == ("zoo", "small", "inference", "cpu", "float32")
    assert "torch" in recorded.environment["packages"]  # type: ignore[operator]
