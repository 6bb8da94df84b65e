"""Files of a captured call that somebody sent: what is damaged, changed or made to harm is refused and runs nothing."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import altered, damaged, readings
from repro_helpers import PLACE, aten, captured, document_in, signed_again

from hashbench.core.diagnose.calls.call import CapturedCall, GeneratorSlot
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment
from hashbench.core.diagnose.repro import call_file
from hashbench.core.diagnose.repro.call_arguments import Arguments
from hashbench.core.diagnose.repro.call_file import _Tensors, named_in, substitutes
from hashbench.core.errors import HashbenchError


@pytest.fixture(autouse=True)
def _no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a number too high for this machine is refused on every machine."""
    monkeypatch.setattr(call_file, "devices_here", dict)


def call_of_all_kinds() -> CapturedCall:
    """An op with two tensors in one memory, a generator, and keyword arguments."""
    x = torch.randn(8)
    return captured(aten.addmv.default, x[:2], torch.randn(2, 3), x[2:5], beta=2.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two files of that call."""
    call = call_of_all_kinds()
    torch.save(call_file.payload(call), tmp_path / "tensors.pt")
    text = call_file.document(call, tensors=tmp_path / "tensors.pt", recorded={"arms": []})
    (tmp_path / "call.json").write_text(text)
    return tmp_path


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(HashbenchError) as raised:
        call_file.read(folder)
    for word in words:
        assert word in str(raised.value)
    assert "nothing was run" in str(raised.value)


def test_whole_files_are_read(folder: Path) -> None:
    saved = call_file.read(folder)
    call = saved.call
    assert (call.op, call.kwargs, saved.recorded) == ("aten.addmv.default", {"beta": 2.0}, {"arms": []})
    assert {name: getattr(call, name) for name in PLACE} == PLACE


def test_tensors_share_memory_again(folder: Path) -> None:
    call = call_file.read(folder).call
    with captured_environment(call):
        live = LiveCall(call)
    assert live.tensors[0].untyped_storage().data_ptr() == live.tensors[2].untyped_storage().data_ptr()


# --------------------------------------------------------------------------------------------------------- damaged

DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no call.json": (lambda f: (f / "call.json").unlink(), "call.json: No such file"),
    "no tensors.pt": (lambda f: (f / "tensors.pt").unlink(), "tensors.pt: No such file"),
    "call.json is a folder": (lambda f: ((f / "call.json").unlink(), (f / "call.json").mkdir()), "Is a directory"),
    "JSON without end": (lambda f: (f / "call.json").write_text("[" * 100_000), "truncated or not JSON"),
    "JSON of something else": (lambda f: (f / "call.json").write_text("[1, 2]"), "holds no call"),
    "a number changed": (lambda f: replace(f, '"beta": 2.0', '"beta": 3.0'), "call.json was changed"),
    "another version": (lambda f: replace(f, '"schema": 1', '"schema": 99'), "version 99"),
}


def replace(folder: Path, old: str, new: str) -> None:
    text = (folder / "call.json").read_text()
    assert old in text
    (folder / "call.json").write_text(text.replace(old, new))


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(damage: Callable[[Path], object], words: str, folder: Path) -> None:
    damage(folder)
    refused(folder, words, "hashbench sweep")


@pytest.mark.parametrize("name", ["call.json", "tensors.pt"])
def test_no_damage_is_overlooked(name: str, folder: Path) -> None:
    content, whole = (folder / name).read_bytes(), call_file.read(folder)
    bad = damaged(content, flips=100)
    for what, found in readings(folder / name, bad, lambda _: call_file.read(folder)):
        assert found is None or (name == "call.json" and found.recorded == whole.recorded), what


# ------------------------------------------------------------------------------------------- made to harm, and signed


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    """Something else at a place of the document."""

    def change(found: dict[str, Any]) -> None:
        *parents, last = path
        for key in parents:
            found = found[key]
        found[last] = value

    return change


def remove(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.pop(name)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a function of Python's": (put("op", value="os.system.default"), "the op os.system.default does not exist"),
    "an attribute of torch.ops": (put("op", value="load_library.x.y"), "does not exist"),
    "an attribute of an op": (put("op", value="aten.add.__class__"), "is not an overload"),
    "a name with more in it": (put("op", value="aten.add.Tensor;import os"), "not the name of an op"),
    "a name that is no text": (put("op", value=["aten"]), "call.json.op is"),
    "a higher-order operator": (put("op", value="higher_order.cond.default"), "does not exist"),
    "an op that nobody defined": (put("op", value="nobody.knows.default"), "--import FILE"),
    "another op": (put("op", value="aten.relu.default"), "takes at most 1 arguments"),
    "an op that needs more": (put("op", value="aten.addcmul.default"), "has no such arguments"),
    "too few arguments": (put("args", value=[{"tensor": 0}]), "needs the argument mat"),
    "too many": (put("args", value=[{"tensor": 0}] * 9), "takes at most 3 arguments"),
    "a text for a tensor": (put("args", 0, value="rm"), "the argument self of aten.addmv.default is not a Tensor"),
    "a list for a number": (put("kwargs", "beta", value=[1]), "the argument beta"),
    "a tensor that is not there": (
        put("args", 0, "tensor", value=3),
        "tensor is 3, which is not a whole number from 0 to 2",
    ),
    "a generator that is not there": (
        put("args", 0, value={"generator": 0, "device": "cpu"}),
        "generator is 0, which is not",
    ),
    "an unknown kind": (put("args", 0, value={"eval": "1"}), "unknown kind 'eval'"),
    "an empty reference": (put("args", 0, value={}), "neither a value nor a reference"),
    "a function for a dtype": (put("kwargs", "beta", value={"torch": "torch.load"}), "'torch.load' is not an argument"),
    "a device that never was": (put("kwargs", "beta", value={"device": "abacus"}), "'abacus' is not a device"),
    "a word for a number": (put("kwargs", "beta", value={"float": "many"}), "'many' is not a number"),
    "arguments that are none": (put("args", value=None), "args is 'None', which is not list"),
    "a form past the end": (put("tensors", 1, "shape", value=[4000, 3]), "reaches outside its memory"),
    "an empty form far away": (
        lambda found: found["tensors"][1].update(shape=[0, 3], offset=2**40),
        "reaches outside its memory",
    ),
    "a form before the start": (put("tensors", 1, "offset", value=-4), "offset is -4, which is not"),
    "strides that step back": (put("tensors", 1, "stride", value=[-3, 1]), "stride is -3, which is not"),
    "sizes that overflow": (put("tensors", 1, "shape", value=[2**61, 2**61]), "is too large"),
    "endless repetition": (
        lambda found: found["tensors"][1].update(shape=[2**40, 2**40], stride=[0, 0]),
        "is too large",
    ),
    "more sizes than strides": (put("tensors", 1, "shape", value=[1, 1, 1]), "another number of strides"),
    "a dtype that is none": (put("tensors", 1, "dtype", value="torch.save"), "'torch.save' is not a dtype"),
    "a quantized dtype without parameters": (put("tensors", 1, "dtype", value="torch.quint8"), "is not a dtype"),
    "truth by another name": (put("tensors", 1, "conj", value=1), "conj is '1', which is not bool"),
    "real numbers to conjugate": (put("tensors", 1, "conj", value=True), "cannot be conjugated"),
    "a whole tensor that is not there": (
        put("tensors", 1, value={"whole": 0, "device": "cpu", "requires_grad": False}),
        "missing in tensors.pt",
    ),
    "a memory of another size": (put("memories", 0, "bytes", value=4096), "another size in tensors.pt"),
    "one memory more": (lambda found: found["memories"].append(found["memories"][0]), "another number of memories"),
    "an address of another kind": (put("memories", 0, "alignment", value=5000), "alignment is 5000, which is not"),
    "a device that is not here": (put("memories", 0, "device", value="cuda:77"), "'cuda:77' is not here"),
    "the device without data": (put("memories", 0, "device", value="meta"), "'meta' has no data"),
    "a million threads": (
        lambda found: (put("threads", value=10**6)(found), found["settings"].update(num_threads="1000000")),
        "threads is 1000000, which is not a whole number from 1 to 4096",
    ),
    "two numbers of threads": (put("settings", "num_threads", value="3000"), "two numbers of threads"),
    "a setting that is no text": (put("settings", "flush_denormal", value=True), "'True', which is not str"),
    "a setting without end": (
        put("settings", "float32_matmul_precision", value="x" * 10_000),
        "precision' is too long",
    ),
    "a function for the default dtype": (
        put("settings", "default_dtype", value="torch.load"),
        "refuses a setting or random state",
    ),
    "no settings": (remove("settings"), "lacks the fields settings"),
    "no place": (remove("place"), "lacks the fields place"),
}


@pytest.mark.parametrize(("forge", "words"), FORGED.values(), ids=FORGED)
def test_forged_call_is_refused(forge: Callable[[dict[str, Any]], object], words: str, folder: Path) -> None:
    found = document_in(folder)
    forge(found)
    signed_again(folder, found)
    refused(folder, words)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_values_in_a_signed_call_are_refused_or_are_a_call(folder: Path) -> None:
    found: Counter[bool] = Counter()
    for what, document in altered(document_in(folder), most=300):
        if not isinstance(document.get("schema"), int):
            continue
        signed_again(folder, document)
        content = (folder / "call.json").read_bytes()
        ((_, read),) = readings(folder / "call.json", [(what, content)], lambda _: call_file.read(folder))
        found[read is None] += 1
    assert found[True] > 150
    assert found[False] > 0


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "tensors.pt", weights_only=True)
    return content


def test_tensors_that_run_code_are_refused(folder: Path) -> None:
    torch.save({**content_of(folder), "whole": [Harm(folder / "harmed")]}, folder / "tensors.pt")
    signed_again(folder, document_in(folder))
    refused(folder, "tensors.pt holds more than tensors")
    assert not (folder / "harmed").exists()


def test_plain_pickle_is_refused(folder: Path) -> None:
    (folder / "tensors.pt").write_bytes(pickle.dumps(Harm(folder / "harmed")))
    signed_again(folder, document_in(folder))
    refused(folder, "tensors.pt holds more than tensors, or is damaged")
    assert not (folder / "harmed").exists()


def test_archive_of_something_else_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tensors.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"no pickle")
    signed_again(folder, document_in(folder))
    refused(folder, "damaged")


FORGED_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no mapping": (lambda content: [content], "no tensors by name"),
    "no memories": (lambda content: {**content, "memories": None}, "no memories"),
    "memory of a different dtype": (
        lambda content: {**content, "memories": [m.view(torch.int8) for m in content["memories"]]},
        "where bytes belong",
    ),
    "memory with holes": (
        lambda content: {**content, "memories": [m.repeat_interleave(2)[::2] for m in content["memories"]]},
        "not in order",
    ),
    "a number for memory": (lambda content: {**content, "memories": [1, 2]}, "where bytes belong"),
    "a random state that is none": (
        lambda content: {**content, "random_states": {"cpu": torch.zeros(9, dtype=torch.uint8)}},
        "refuses a setting or random state",
    ),
    "a random state of Python that is none": (
        lambda content: {**content, "random_states": {"python": torch.zeros(9, dtype=torch.int64)}},
        "refuses a setting or random state",
    ),
    "a random state of a device that is not here": (
        lambda content: {**content, "random_states": {"cuda:77": torch.zeros(16, dtype=torch.uint8)}},
        "'cuda:77' is not here",
    ),
    "random states without names": (
        lambda content: {**content, "random_states": {0: torch.zeros(9, dtype=torch.uint8)}},
        "has no name",
    ),
}


@pytest.mark.parametrize(("forge", "words"), FORGED_TENSORS.values(), ids=FORGED_TENSORS)
def test_forged_tensors_are_refused(forge: Callable[[dict[str, Any]], object], words: str, folder: Path) -> None:
    before = torch.get_rng_state()
    torch.save(forge(content_of(folder)), folder / "tensors.pt")
    signed_again(folder, document_in(folder))
    refused(folder, words)
    assert torch.equal(torch.get_rng_state(), before)


FAR = 10**9
SPARSE: dict[str, tuple[torch.layout, Callable[[torch.Tensor], Any]]] = {
    "COO": (torch.sparse_coo, lambda tensor: tensor._indices()),
    "CSR": (torch.sparse_csr, lambda tensor: tensor.col_indices()),
    "rows of CSR": (torch.sparse_csr, lambda tensor: tensor.crow_indices()),
    "CSC": (torch.sparse_csc, lambda tensor: tensor.row_indices()),
    "columns of CSC": (torch.sparse_csc, lambda tensor: tensor.ccol_indices()),
    "BSR": (torch.sparse_bsr, lambda tensor: tensor.col_indices()),
    "BSC": (torch.sparse_bsc, lambda tensor: tensor.row_indices()),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("index", [FAR, -1], ids=["behind its end", "before its start"])
@pytest.mark.parametrize(("layout", "indices"), SPARSE.values(), ids=SPARSE)
def test_sparse_tensor_that_points_outside_itself_is_refused(
    layout: torch.layout, indices: Callable[[torch.Tensor], Any], index: int, folder: Path
) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    call = captured(aten.clone.default, torch.eye(4).to_sparse(layout=layout, blocksize=blocks))
    content = call_file.payload(call)
    torch.save(content, folder / "tensors.pt")
    (folder / "call.json").write_text(call_file.document(call, tensors=folder / "tensors.pt", recorded={}))
    call_file.read(folder)
    indices(content["whole"][0])[..., -1] = index
    torch.save(content, folder / "tensors.pt")
    signed_again(folder, document_in(folder))
    refused(folder, "damaged")
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


def test_jagged_tensor_whose_offsets_nobody_checks_is_refused(folder: Path) -> None:
    call = captured(aten.clone.default, torch.ones(4))
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    jagged.offsets()[-1] = FAR
    content = {**call_file.payload(call), "whole": [jagged]}
    torch.save(content, folder / "tensors.pt")
    document = json.loads(call_file.document(call, tensors=folder / "tensors.pt", recorded={}))
    document["tensors"] = [{"whole": 0, "device": "cpu", "requires_grad": False}]
    signed_again(folder, document)
    refused(folder)


# --------------------------------------------------------------------------------------- on which device it is replayed

MOVED = {"cuda:3": "cuda:0"}


@pytest.mark.parametrize(
    ("named", "here", "moved"),
    [
        pytest.param({"cuda:3"}, {"cuda": 1}, MOVED, id="a number that is not here"),
        pytest.param({"cuda:3", "cpu"}, {"cuda": 3}, MOVED, id="beside the host"),
        pytest.param({"cuda:3"}, {"cuda": 4}, {}, id="a number that is here"),
        pytest.param({"cuda:0"}, {"cuda": 1}, {}, id="the first"),
        pytest.param({"cuda"}, {"cuda": 1}, {}, id="no number"),
        pytest.param({"cuda:3"}, {}, {}, id="no accelerator at all"),
        pytest.param({"cuda:3"}, {"xpu": 2}, {}, id="one of another kind"),
        pytest.param({"cuda:0", "cuda:3"}, {"cuda": 1}, {}, id="two that would become one"),
        pytest.param({"cuda:3", "xpu:2"}, {"cuda": 1}, MOVED, id="each kind by itself"),
        pytest.param({"abacus", "cuda:x", ":3"}, {"cuda": 1}, {}, id="no devices"),
    ],
)
def test_which_device_takes_the_place_of_one_that_is_not_here(
    named: set[str], here: Mapping[str, int], moved: Mapping[str, str]
) -> None:
    assert substitutes(named, here) == moved


def test_a_call_names_the_devices_of_all_its_parts() -> None:
    args = [{"generator": 0, "device": "cuda:1"}, [{"device": "cuda:2"}], 3, "cuda:9"]
    memories = [{"bytes": 8, "device": "cpu"}]
    assert named_in([args, {"device": {"device": "meta"}}, memories, None]) == {"cuda:1", "cuda:2", "meta", "cpu"}


def test_arguments_and_random_states_move_with_the_call() -> None:
    arguments = Arguments(tensors=0, generators=1, moved=MOVED)
    assert arguments.decoded({"device": "cuda:3"}) == torch.device("cuda:0")
    assert arguments.decoded({"device": "cuda:1"}) == torch.device("cuda:1")
    assert arguments.decoded({"generator": 0, "device": "cuda:3"}) == GeneratorSlot(0, "cuda:0")
    state = torch.get_rng_state()
    held = _Tensors(Path("tensors.pt"), {"random_states": {"cpu:3": state}}, {"cpu:3": "cpu:0"})
    assert held.random_states() == {"cpu:0": state}
