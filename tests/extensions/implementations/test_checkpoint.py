"""Reading safetensors: files, folders with an index, what is refused, and how much is in memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations import digest, located
from hashbench.extensions.implementations.checkpoint import open_checkpoint
from hashbench.extensions.implementations.compare import compare_weights
from hashbench.extensions.implementations.state import state_of

KINDS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def refused(path: Path) -> str:
    with pytest.raises(HashbenchError) as error:
        open_checkpoint(path)
    return str(error.value)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_bits_of_a_file_are_those_of_the_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    made = {"x": (torch.randn(5, 7) * 8).relu().to(dtype), "s": torch.ones((), dtype=dtype)}
    safetensors.torch.save_file(made, tmp_path / "x.safetensors")
    read, held = open_checkpoint(tmp_path / "x.safetensors"), state_of(made, "a")
    assert read.headers == held.headers
    assert read.read("x", 3, 20).tolist() == held.read("x", 3, 20).tolist()
    assert len({*held.read("x", 0, 35).tolist()}) > 1


def test_a_folder_is_read_as_its_index_says(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "1.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(4)}, tmp_path / "stray.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}), encoding="utf-8")
    read = open_checkpoint(tmp_path)
    assert {name: header.shape for name, header in read.headers.items()} == {"a": (3,), "b": (3,)}
    index.unlink()
    assert "stray.safetensors" in refused(tmp_path)  # which has a tensor a as well
    (tmp_path / "stray.safetensors").unlink()
    assert {*open_checkpoint(tmp_path).headers} == {"a", "b"}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors, which is not in the folder"),
        ('{"weight_map": {"a": "../1.safetensors"}}', "which is not in the folder"),
        ('{"weight_map": {"gone": "1.safetensors"}}', "names the tensor gone, which no file has"),
        ('{"weight_map": []}', "no index of safetensors"),
        ("[" * 100_000, "no index of safetensors"),
        ("{", "no index of safetensors"),
    ],
)
def test_a_wrong_index_is_refused(index: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folder / "1.safetensors", tmp_path / "1.safetensors"):
        safetensors.torch.save_file({"a": torch.ones(3)}, path)
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert said in refused(folder)
    assert "nothing was compared" in refused(folder)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_a_pickle_is_refused_and_not_opened(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"a": torch.ones(3)}, path)
    for refusal in (refused(path), refused(tmp_path)):
        assert "it is a pickle, and to read one runs the code in it, so nothing was compared" in refusal
        assert "Save the weights as safetensors" in refusal


def test_garbage_is_refused_wherever_a_file_is_cut(tmp_path: Path) -> None:
    whole = safetensors.torch.save({"a": torch.randn(3, 4), "b": torch.randn(5)})
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "nothing was compared" in refused(path), length
    path.write_bytes(whole)
    assert {*open_checkpoint(path).headers} == {"a", "b"}


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{}",
        "null",
        '{"a": 1}',
        '{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4000, 4004]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_does_not_fit_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    assert "nothing was compared" in refused(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    assert "nothing was compared" in refused(tmp_path / "x.safetensors")
    assert "it has no file *.safetensors" in refused(tmp_path / "empty")
    assert "it does not exist" in refused(tmp_path / "none.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.randn(100)}, path)
    read = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(HashbenchError, match="it ends inside the tensor a"):
        read.read("a", 0, 100)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of a 256th of their usual size; the memory that a comparison may take then, in bytes."""
    for module in (digest, located):
        monkeypatch.setattr(module, "CHUNK", 2**12)
    monkeypatch.setattr(located, "LINES_AT_ONCE", 2**12)
    return 2**30 // 256


@pytest.mark.parametrize("what", ["as it is", "fused", "changed", "transposed", "changed and transposed"])
def test_a_checkpoint_larger_than_the_memory_is_compared(what: str, small_parts: int, tmp_path: Path) -> None:
    """16 MiB of tensors of 2 MiB, in at most 4 MiB and one tensor."""
    torch.manual_seed(0)
    a = {f"layers.{number}.weight": torch.randn(512, 1024) for number in range(8)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    if what == "fused":
        b = {
            f"w.{number}": torch.cat([a[f"layers.{number}.weight"], a[f"layers.{number + 1}.weight"]])
            for number in (0, 2, 4, 6)
        }
    if "changed" in what:
        b["layers.3.weight"] += 1
    if "transposed" in what:
        b = {name: tensor.t().contiguous() for name, tensor in b.items()}
    for name, state in (("a", a), ("b", b)):
        safetensors.torch.save_file(state, tmp_path / f"{name}.safetensors")
    one, other = (open_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab")
    np.intersect1d(*2 * [np.ones(3, np.uint64)])  # imports a part of NumPy, which is not ours
    tracemalloc.start()
    try:
        verdict = compare_weights(one, other)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [each.kind for each in verdict.differences] == (["changed"] if "changed" in what else [])
    assert peak < small_parts + 2 * 2**20
