"""The parts that are found in a dataset."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from hashbench.tools.pipeline.loading import dissect, hash_calls


def test_a_global_generator_is_not_also_one_of_the_datasets_own() -> None:
    class Holding:
        def __init__(self) -> None:
            self.normal, self.random, self.torch = np.random.normal, random.random, torch.default_generator
            self.own = np.random.default_rng(3)

    assert list(dissect(Holding()).generators) == ["dataset.own"]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("x = 1\nseed = hash('name')\n", ("made.py:2",)),
        ("files = sorted('ab', key=hash)\n", ("made.py:1",)),
        ("class A:\n    def __hash__(self):\n        return hash(1)\n", ()),
        ("hash = 3\n", ()),
        ("import hashlib\nhashlib.sha256(b'').hexdigest()\n", ()),
    ],
    ids=["a call", "as a function", "what a set asks for", "another name", "a checksum"],
)
def test_lines_that_call_hash(
    code: str, lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made")
    module.__file__ = str(tmp_path / "made.py")
    Path(module.__file__).write_text(code, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "made", module)
    assert hash_calls(["made", "absent"]) == lines
