"""Folders of files: steps, order, what is refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations.dumps.compare import read_dump
from hashbench.extensions.implementations.dumps.sketch import sketch_of


def empty_files(folder: Path, *names: str) -> Path:
    """Write a small array under each name, in an order of time that is that of the arguments."""
    for place, name in enumerate(names):
        file = folder / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, np.ones(2))
        os.utime(file, ns=(place, place))
    return folder


def touched(folder: Path) -> Path:
    """Give all files the same time."""
    for file in folder.rglob("*"):
        os.utime(file, ns=(0, 0))
    return folder


ORDERS: dict[str, tuple[list[str], str, list[int | None]]] = {
    "numbers first": (["2_a", "10_b", "11_a"], "of numbers in the names", [None] * 3),
    "an index": (["x___dump_index=2", "x___dump_index=10"], "of numbers in the names", [None] * 2),
    "folders of steps": (
        ["step_2/1_z", "step_2/2_a", "step_10/1_z"],
        "steps, then of numbers in the names",
        [2, 2, 10],
    ),
    "numbered folders": (["2/1_z", "10/1_z"], "steps, then of numbers in the names", [2, 10]),
    "passes in names": (["forward_pass_id=2___x", "forward_pass_id=10___x"], "steps, then of the times", [2, 10]),
    "times": (["l.0.z", "l.0.a", "l.1.z", "l.1.a"], "of the times at which files were written", [None] * 4),
}


@pytest.mark.parametrize(("names", "order", "steps"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_calls(names: list[str], order: str, steps: list[int | None], tmp_path: Path) -> None:
    dump = read_dump(empty_files(tmp_path, *names))
    assert [each.name for each in dump.tensors] == names
    assert dump.order.startswith(order)
    assert ([each.step for each in dump.tensors], dump.of_calls) == (steps, True)


def test_times_that_contradict_the_layers_are_no_order(tmp_path: Path) -> None:
    dump = read_dump(empty_files(tmp_path, "l.2.a", "l.10.a", "l.1.a"))
    assert ([each.name for each in dump.tensors], dump.of_calls) == (["l.1.a", "l.2.a", "l.10.a"], False)


def test_files_of_the_same_time_are_in_the_order_of_names(tmp_path: Path) -> None:
    dump = read_dump(touched(empty_files(tmp_path, "l.1.z", "l.1.a")))
    assert ([each.name for each in dump.tensors], dump.order) == (["l.1.a", "l.1.z"], "of names")


def test_a_file_may_hold_a_dict_of_tensors(tmp_path: Path) -> None:
    state = {"z": torch.rand(3), "a": [torch.rand(2), torch.rand(1)], "n": 3, "p": torch.nn.Parameter(torch.rand(1))}
    torch.save(state, tmp_path / "x.pt")
    dump = read_dump(tmp_path / "x.pt")
    assert [each.name for each in dump.tensors] == ["x:z", "x:a.0", "x:a.1", "x:p"]
    assert (dump.order, dump.of_calls) == ("as saved in the file", True)
    safetensors.torch.save_file({"l.10": torch.rand(3), "l.2": torch.rand(3)}, tmp_path / "x.safetensors")
    dump = read_dump(tmp_path / "x.safetensors")
    assert ([each.name for each in dump.tensors], dump.of_calls) == (["x:l.2", "x:l.10"], False)


VALUES = torch.tensor([[1.5, -2.0, 3.0], [0.0, 1.0, -0.5]])


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8])
def test_values_are_read_in_every_dtype(suffix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = VALUES.abs().to(dtype)
    save: dict[str, Callable[[Path], object]] = {
        ".npy": lambda file: np.save(file, made.numpy()),
        ".pt": lambda file: torch.save(made, file),
        ".safetensors": lambda file: safetensors.torch.save_file({"x": made}, file),
    }
    save[suffix](tmp_path / f"x{suffix}")
    (found,) = (sketch_of(each) for each in read_dump(tmp_path).tensors)
    assert found.header.shape == (2, 3)
    assert found.moments.sums[:2] == (float(made.double().sum()), float(made.double().square().sum()))


def test_other_orders_of_elements_in_memory_are_read(tmp_path: Path) -> None:
    values = np.arange(6.0).reshape(2, 3)
    for name, array in (("a", values), ("b", np.asfortranarray(values)), ("c", values.astype(">f8"))):
        np.save(tmp_path / f"{name}.npy", array)
    assert len({sketch_of(each).digest for each in read_dump(tmp_path).tensors}) == 1


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was_run",)


def _pickled(file: Path) -> None:
    file.with_suffix(".pt").write_bytes(pickle.dumps(Evil()))


def _saved(file: Path) -> None:
    torch.save({"x": torch.ones(3), "y": Evil()}, file.with_suffix(".pt"))


def _objects(file: Path) -> None:
    np.save(file.with_suffix(".npy"), np.array([Evil()]), allow_pickle=True)


def _cut(suffix: str, save: Callable[[Path], object]) -> Callable[[Path], None]:
    def made(file: Path) -> None:
        save(file.with_suffix(suffix))
        whole = file.with_suffix(suffix).read_bytes()
        file.with_suffix(suffix).write_bytes(whole[: len(whole) - 40])

    return made


def _compressed(file: Path) -> None:
    torch.save(torch.zeros(1000), file)
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(file.with_suffix(".pt"), "w", zipfile.ZIP_DEFLATED) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))


def _nonsense(file: Path) -> None:
    np.save(file.with_suffix(".npy"), np.ones(3))
    whole = file.with_suffix(".npy").read_bytes()
    file.with_suffix(".npy").write_bytes(whole.replace(b"}", b"("))  # what NumPy tokenizes, and does not catch


def _mixed(file: Path) -> None:
    np.save(file.with_suffix(".npy"), np.ones(3))
    torch.save(torch.ones(3), file.with_suffix(".pt"))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty folder": (lambda _: None, "it has no file *.npy, *.pt, *.pth, *.safetensors, so nothing was compared"),
    "a pickle": (_pickled, "nothing is unpickled (BadZipFile"),
    "a pickle in a file of torch": (_saved, "it holds more than tensors, and nothing is unpickled (UnpicklingError"),
    "objects in a file of NumPy": (_objects, "Array can't be memory-mapped: Python objects in dtype"),
    "half a .npy": (_cut(".npy", lambda file: np.save(file, np.ones(100))), "it was cut, or holds more than numbers"),
    "half a .pt": (
        _cut(".pt", lambda file: torch.save(torch.ones(100), file)),
        "it was cut, or holds more than numbers",
    ),
    "half a .safetensors": (
        _cut(".safetensors", lambda file: safetensors.torch.save_file({"x": torch.ones(100)}, file)),
        "it was cut",
    ),
    "an empty file": (lambda file: file.with_suffix(".npy").touch(), "it was cut, or holds more than numbers"),
    "a compressed archive": (_compressed, "its members are compressed or overlap"),
    "a header of nonsense": (_nonsense, "it was cut, or holds more than numbers"),
    "several formats": (_mixed, "it mixes formats ("),
    "no tensor": (lambda file: torch.save({"n": 3}, file.with_suffix(".pt")), "it has none"),
    "a sparse tensor": (
        lambda file: torch.save(torch.eye(3).to_sparse(), file.with_suffix(".pt")),
        "Save plain tensors",
    ),
    "texts": (lambda file: np.save(file.with_suffix(".npy"), np.array(["a"])), "its dtype is str"),
    "a folder of that name": (lambda file: file.with_suffix(".npy").mkdir(), "it has no file"),
}


@pytest.mark.parametrize(("write", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_told(
    write: Callable[[Path], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x")
    with pytest.raises(HashbenchError, match=r"cannot read .*(nothing was compared|Save plain)") as error:
        read_dump(tmp_path)
    assert said in str(error.value)
    assert not Path("was_run").exists()


def test_a_path_that_is_no_dump_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x", encoding="utf-8")
    for name, said in (("gone", "it does not exist"), ("x.txt", "no reader knows such a file")):
        with pytest.raises(HashbenchError, match=said):
            read_dump(tmp_path / name)
