"""Fingerprints that sweeps kept: what compare and the night's report say of rows that became other than they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.changes import changes_between, changes_text
from hashbench.extensions.fingerprint.document import ModelFingerprint
from tests.extensions.fingerprint.fingerprints import MM, NET, NEW, OLD, OTHER_MM, PICK


@pytest.mark.slow
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
