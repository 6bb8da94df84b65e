"""A recording on disk: it comes back as it was; what is missing, damaged, sent or of another run is refused."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hashbench.core.errors import HashbenchError
from hashbench.core.records import OpRecord, TensorDigest
from hashbench.core.trace.digest import dtype_name
from hashbench.tools.observer import files
from hashbench.tools.observer.recording import Observation, Recording, Saved

NASTY = ["", "a b", "é\n\t", "\x1b[31m", "../x", "\ud800", "=:#/->"]


def recording() -> Recording:
    digest = TensorDigest("float32", (2, 3), (1, 2), "0123456789abcdef")
    value = TensorDigest("str", (), (), repr("a: [b]"))
    observations = [
        Observation(
            f"{text}_1",
            OpRecord(f"op {text}", "forward", 0, text, "op", arguments=text, outputs=(digest, value), source=text),
        )
        for text in NASTY
    ]
    saved = (Saved(0, "float32", (2, 3), "cpu"), Saved(1, "complex128", (), "cpu"))
    observations.append(Observation("kept_1", OpRecord("kept", "backward", 0, "", "op", scalar="3"), saved))
    return Recording("run", tuple(observations), {"threads": {"intra_op": 1}, "device": {"type": "cpu"}})


TENSORS = (torch.arange(6.0).reshape(2, 3), torch.tensor(1 + 2j, dtype=torch.complex128))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = files.path_of(tmp_path / "new" / "folder", "run")
    files.write(place, recording(), TENSORS)
    return place


def signed(document: dict[str, Any]) -> bytes:
    """A document as a sender who computes the checksum would send it."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**rest, "sha256": sha256}).encode()


def test_it_comes_back_as_it_was_without_a_pickle_or_a_temporary_file(path: Path) -> None:
    found, tensors = files.read_reference(path)
    assert found == files.read(path) == recording()
    assert all(torch.equal(tensors[number], tensor) for number, tensor in enumerate(TENSORS))
    written = sorted(path.parent.iterdir())
    assert [file.suffix for file in written] == [".safetensors", ".json"]
    assert not any(file.read_bytes().startswith((b"\x80", b"PK")) for file in written)


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    packed = ("torch.q", "torch.bits", "torch.uint1", "torch.int1")
    names = [dtype for dtype in found if not str(dtype).startswith(packed)]
    return sorted((d for d in names if str(d) in KEPT or d.is_floating_point or d.is_complex), key=str)


KEPT = [f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]


@pytest.mark.filterwarnings("ignore:.*omplex:UserWarning")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = dtype.itemsize
    count = torch.Size(shape).numel()
    tensor = torch.arange(count * size, dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype is torch.bool:
        tensor = torch.ones(shape, dtype=torch.bool)
    copy = files.savable(tensor, "x")
    one = Observation("x_1", OpRecord("x", "forward", 0, "", "x"), (Saved(0, dtype_name(dtype), shape, "cpu"),))
    files.write(tmp_path / "x.json", Recording("x", (one,)), [copy])
    back = files.read_reference(tmp_path / "x.json")[1][0]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


ODD_TENSORS = {
    "sparse_coo tensor": lambda: torch.eye(3).to_sparse(),
    "sparse_csr tensor": lambda: torch.eye(3).to_sparse_csr(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta tensor": lambda: torch.empty(3, device="meta"),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_that_cannot_be_kept_is_refused_by_name(kind: str) -> None:
    with pytest.raises(HashbenchError, match=rf"cannot save 'mask', a \S*{kind}: it could not be put back"):
        files.savable(ODD_TENSORS[kind](), "mask")


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a\0b", "a\ud800"])
def test_a_name_that_is_none_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HashbenchError, match="invalid run name"):
        files.path_of(tmp_path, name)


ONE = Observation("x_1", OpRecord("x", "forward", 0, "", "x"))
REFUSED = {
    "missing": (None, r"nothing was compared \(No such file"),
    "a pickle": (b"\x80\x04cbuiltins\nexit\n(tR.", "not JSON"),
    "empty": (Recording("x", ()), "holds no observations"),
    "a check in which values were put back": (
        Recording("x", (ONE,), checked=True, put_back=2), "the 2 values put back in it stand in its own reference"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_with_is_refused(tmp_path: Path, content: bytes | Recording | None, said: str) -> None:
    path = tmp_path / "run.json"
    if isinstance(content, Recording):
        files.write(path, content, [])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(HashbenchError, match=said) as caught:
        files.read_reference(path)
    assert "\n" not in str(caught.value)
    if isinstance(content, Recording):
        assert files.read(path).put_back == content.put_back


@pytest.mark.parametrize("version", [2, 1.0, "1"])
def test_another_schema_version_is_refused(path: Path, version: object) -> None:
    path.write_bytes(signed({**json.loads(path.read_bytes()), "schema": version}))
    with pytest.raises(HashbenchError, match="schema version"):
        files.read_reference(path)


def test_a_run_that_failed_leaves_the_earlier_one_and_is_no_reference(path: Path) -> None:
    files.write(path, Recording("run", (), error="ValueError: stop"), TENSORS)
    assert files.read_reference(path)[0] == recording()
    with pytest.raises(HashbenchError, match="its run ended with an error: ValueError: stop"):
        files.read_reference(path.with_name("run.incomplete.json"))
    files.write(path, recording(), TENSORS)
    assert not path.with_name("run.incomplete.json").exists()


def test_a_crash_between_the_two_files_leaves_the_earlier_run_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replace_file", crash)
    with pytest.raises(OSError, match="No space"):
        files.write(path, recording(), [TENSORS[0] + 1, TENSORS[1]])
    found, tensors = files.read_reference(path)
    assert found == recording()
    assert torch.equal(tensors[0], TENSORS[0])


def test_the_next_run_of_the_name_leaves_no_tensors_of_the_last(path: Path) -> None:
    other = path.with_name("run.notes.safetensors")
    other.write_bytes(b"of somebody else")
    files.write(path, recording(), [TENSORS[0] + 1, TENSORS[1]])
    kept = list(path.parent.glob("*.safetensors"))
    assert len(kept) == 2
    assert other in kept
    assert torch.equal(files.read_reference(path)[1][0], TENSORS[0] + 1)


# ---------------------------------------------------------------------------------------------------- what is sent


Read = tuple[Recording, dict[int, torch.Tensor]] | None


def read(path: Path) -> Read:
    return next(fuzzing.readings(path, [("", path.read_bytes())], files.read_reference))[1]


def nested(depth: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"deeper": inner}, range(depth), {})


FIRST, SECOND = (("observations", -1, "saved", number, slice(1, 3)) for number in (0, 1))
ENVIRONMENT, OUTPUT = ("environment",), ("observations", 0, "outputs", 0)
HARMFUL = {
    "different dtype": (FIRST, ["int32", [2, 3]]),
    "different shape": (FIRST, ["float32", [3, 2]]),
    "a name twice": (("observations", 1, "name"), "_1"),
    "no dtype": (FIRST, ["Tensor", [2, 3]]),
    "different shape of bytes": (SECOND, ["complex128", [2]]),
    "a size that no tensor has": (SECOND, ["complex128", [10**30]]),
    "different dtype of bytes": (SECOND, ["float64", []]),
    "an environment nested without end": (ENVIRONMENT, nested(300)),
    "a digest of 300 sizes": (OUTPUT, f"float32[{','.join('9' * 300)}]:0123456789abcdef"),
    "a digest with a size of 21 digits": (OUTPUT, f"float32[{'9' * 21}]:0123456789abcdef"),
}


@pytest.mark.parametrize(("place", "value"), HARMFUL.values(), ids=HARMFUL)
def test_what_a_sender_signed_and_cannot_be_is_refused(path: Path, place: tuple[Any, ...], value: Any) -> None:
    document = json.loads(path.read_bytes())
    *way, last = place
    functools.reduce(operator.getitem, way, document)[last] = value
    path.write_bytes(signed(document))
    assert read(path) is None


def test_no_damage_to_the_json_is_overlooked(path: Path) -> None:
    bad = fuzzing.damaged(path.read_bytes())
    found = [read and read[0] for _, read in fuzzing.readings(path, bad, files.read_reference)]
    assert all(each in (None, recording()) for each in found)  # white space says nothing
    assert found.count(None) > 100


def test_no_damage_to_the_tensors_is_overlooked(path: Path) -> None:
    [place] = path.parent.glob("*.safetensors")
    bad = fuzzing.damaged(place.read_bytes())
    assert not any(found for _, found in fuzzing.readings(place, bad, lambda _: files.read_reference(path)))
    place.unlink()
    assert read(path) is None


@pytest.mark.slow
def test_tensors_made_to_harm_are_refused_though_the_checksum_is_theirs(path: Path) -> None:
    [place] = path.parent.glob("*.safetensors")
    document = json.loads(path.read_bytes())
    for name, damaged in fuzzing.damaged(place.read_bytes(), flips=200):
        sha256 = hashlib.sha256(damaged).hexdigest()
        path.with_name(f"run.{sha256[:16]}.safetensors").write_bytes(damaged)
        path.write_bytes(signed({**document, "tensors": sha256}))
        if found := read(path):  # other content is the sender's right; another form is not
            assert [(t.dtype, t.shape) for t in found[1].values()] == [(t.dtype, t.shape) for t in TENSORS], name


@pytest.mark.slow
def test_values_made_to_harm_are_refused_or_are_only_values(path: Path) -> None:
    bad = [(name, signed(altered)) for name, altered in fuzzing.altered(json.loads(path.read_bytes()), most=600)]
    found = [read for _, read in fuzzing.readings(path, bad, files.read_reference)]
    assert all(read is None or (read[0].observations and len(read[1]) == 2) for read in found)
    assert found.count(None) > 300
    assert len(found) - found.count(None) > 20
