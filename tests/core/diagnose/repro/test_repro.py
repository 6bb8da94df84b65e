"""The repro of a captured call: written whole or not at all, read back as it was, run by a Python with torch alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import address_ops
import pytest
import torch
from repro_helpers import adding_rows, aten, captured
from torch.testing._internal.two_tensor import TwoTensor

from hashbench.core.commands import replay_command
from hashbench.core.diagnose import replay, repro
from hashbench.core.diagnose.calls import ops
from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment
from hashbench.core.diagnose.repro import call_file, run_in_fresh_process
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Budget
from hashbench.core.records import ExperimentResult
from tests.core.diagnose.repro.writing import REPEAT, differs, ran, written

# ---------------------------------------------------------------------------------------------------- as it was


def aliased() -> CapturedCall:
    x = torch.randn(6, 12)[:, ::2]
    return captured(aten.add_.Tensor, x, x.t(), alpha=2)


def overlapping() -> CapturedCall:
    x = torch.randn(20)
    return captured(aten.copy_.default, x[2::2], x[:-2:2])


def at_an_odd_address() -> CapturedCall:
    x = torch.randn(300)
    return captured(aten.dot.default, x[1:101], x[103:203])


def seen_as_another_type() -> CapturedCall:
    x = torch.randn(8)
    return captured(aten.bitwise_xor_.Tensor, x.view(torch.int32)[::2], x.view(torch.int32)[1::2])


def drawing_from_a_generator() -> CapturedCall:
    return captured(aten.normal_.default, torch.zeros(40), 1.0, 2.0, generator=torch.Generator().manual_seed(7))


CALLS: dict[str, Callable[[], CapturedCall]] = {
    "arguments that share memory": aliased,
    "views that overlap": overlapping,
    "memory that begins at an odd place": at_an_odd_address,
    "the bits of floating-point numbers as integers": seen_as_another_type,
    "a generator": drawing_from_a_generator,
    "the default generator": lambda: captured(aten.native_dropout.default, torch.ones(100), 0.5, True),
    "an overload whose name is a keyword": lambda: captured(aten.random_.__getattr__("from"), torch.zeros(9), 2, 50),
    "a list with an absent tensor": lambda: captured(
        aten.index.Tensor, torch.randn(3, 4), [None, torch.tensor([1, 3])]
    ),
    "lists of tensors, and nothing returned": lambda: captured(
        aten._foreach_add_.List, [torch.randn(3), torch.randn(2, 2)], [torch.randn(3), torch.randn(2, 2)], alpha=0.5
    ),
    "an expanded tensor": lambda: captured(aten.add.Tensor, torch.randn(4, 1).expand(4, 5), 2),
    "a transposed tensor": lambda: captured(aten.mm.default, torch.randn(3, 4).t(), torch.randn(3, 4)),
    "a conjugated tensor": lambda: captured(aten.clone.default, torch.randn(4, dtype=torch.complex64).conj()),
    "a negated view": lambda: captured(aten.clone.default, torch.randn(4, dtype=torch.complex64).conj().imag),
    "bfloat16": lambda: captured(aten.mul.Tensor, torch.randn(5, 3).bfloat16(), 3.0),
    "float8": lambda: captured(aten.clone.default, torch.randn(5).to(torch.float8_e4m3fn)),
    "booleans": lambda: captured(aten.logical_not.default, torch.tensor([True, False])),
    "no elements": lambda: captured(aten.add.Tensor, torch.zeros(0, 3), torch.zeros(0, 3)),
    "no dimensions": lambda: captured(aten.add.Tensor, torch.tensor(2.5), torch.tensor(3)),
    "no tensors": lambda: captured(
        aten.full.default, [2, 3], 7.5, dtype=torch.float64, layout=torch.strided, device=torch.device("cpu")
    ),
    "numbers that are none, and infinite": lambda: captured(
        aten.clamp.default, torch.randn(9), float("-inf"), float("nan")
    ),
    "a memory format": lambda: captured(aten.clone.default, torch.randn(1, 2, 3, 3), memory_format=torch.channels_last),
    "a number returned": lambda: captured(aten._local_scalar_dense.default, torch.tensor(1.5)),
    "a text": lambda: captured(aten.div.Tensor_mode, torch.randn(4), torch.randn(4), rounding_mode="floor"),
    "a sparse tensor": lambda: captured(aten.mm.default, torch.eye(3).to_sparse(), torch.randn(3, 3)),
    "a sparse result": lambda: captured(aten._to_sparse.default, torch.eye(3)),
    "a compressed sparse tensor": lambda: captured(
        aten.values.default, torch.eye(3).to_sparse_csr().requires_grad_(False)
    ),
    "a quantized tensor": lambda: captured(
        aten.dequantize.self, torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.quint8)
    ),
    "a parameter": lambda: captured(aten.relu_.default, torch.nn.Parameter(torch.randn(4)).data),
    "memory of another size afterwards": lambda: captured(
        aten.add.out, torch.randn(9), torch.randn(9), out=torch.zeros(0)
    ),
}

quietly = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def run_here(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Exit code and names of the script, run in this process, where torch is loaded already."""
    names: dict[str, Any] = {"__file__": str(folder / "repro.py")}
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        exec(compile((folder / "repro.py").read_text(), "repro.py", "exec"), names)
    except SystemExit as ending:
        return ending.code, names
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    raise AssertionError("the script does not exit")


def outcome(call: CapturedCall) -> Any:
    with captured_environment(call):
        live = LiveCall(call)
        return live.run().digests()


@quietly
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_files_and_script_have_the_call_as_it_was(make: Callable[[], CapturedCall], tmp_path: Path) -> None:
    call = make()
    folder = written(tmp_path / "repro", call, ExperimentResult("repeat", "call", trials=20, seconds=1.0))
    again = call_file.read(folder).call
    texts = [(of.op, of.func, str(of.args), str(of.kwargs), of.settings, of.threads, of.module) for of in (again, call)]
    assert texts[0] == texts[1]
    forms = [[form for form in of.tensors if not isinstance(form, torch.Tensor)] for of in (call, again)]
    assert forms[0] == forms[1]
    for before, after in zip(call.memories, again.memories, strict=True):
        assert before.alignment == after.alignment
        assert torch.equal(before.content, after.content)
    assert outcome(again) == outcome(call)
    code, names = run_here(folder)
    assert code == 0
    with captured_environment(call):
        live = LiveCall(call)
        expected = names["leaves"]([live.run().output, live.tensors])
    assert names["digest"](names["first"]) == names["digest"](expected)


def test_inputs_lie_at_the_addresses_that_they_had(tmp_path: Path) -> None:
    call = at_an_odd_address()
    folder = written(tmp_path / "repro", call, ExperimentResult("repeat", "call", trials=20, seconds=1.0))
    _, names = run_here(folder)
    with captured_environment(call):
        there = [tensor.data_ptr() % 64 for tensor in LiveCall(call).tensors]
    assert there[0] % 64 != 0
    assert [tensor.data_ptr() % 64 for tensor in names["tensors"](names["memories"]())] == there
    moved = names["tensors"](names["memories"]((16,)))
    assert [tensor.data_ptr() % 64 for tensor in moved] == [(place + 16) % 64 for place in there]


# ------------------------------------------------------------------------------------------- in a process of its own


@pytest.mark.slow
def test_race_of_threads_is_reproduced_and_its_output_kept(tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", adding_rows(), REPEAT)
    said = ran(folder)
    assert differs(said)
    text = (folder / "REPORT.md").read_text()
    assert f"```\n{said.removeprefix('in a fresh process ')} from the first; " in text
    assert repro.NOT_RUN not in text
    assert "calls differ" not in repro.with_output(text, "other")


@pytest.mark.slow
def test_call_that_agrees_is_not(tmp_path: Path) -> None:
    call = captured(aten.mm.default, torch.randn(30, 30), torch.randn(30, 30))
    assert ran(written(tmp_path / "repro", call, REPEAT)) == "in a fresh process 0 of 500 calls differ"


@pytest.mark.slow
def test_dependence_on_the_address_is_reproduced_by_moving(tmp_path: Path) -> None:
    call = captured(torch.ops.addressed.total.default, torch.randn(1001))
    folder, moved = moved_repro(tmp_path, call)
    assert moved.differing, moved
    assert differs(ran(folder, definition=address_ops.__file__))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["dot", "mv"])
def test_a_torch_kernel_that_goes_by_address_is_reproduced(
    op: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    left = torch.randn(1001) if op == "dot" else torch.randn(64, 301)
    func, inputs = getattr(aten, op).default, (left, torch.randn(left.shape[-1]))
    expected = address_ops.goes_by_addresses(func, *inputs, said=record_property)
    folder, moved = moved_repro(tmp_path, captured(func, *inputs))
    assert (moved.differing > 0) == expected
    assert differs(ran(folder)) == expected


def moved_repro(folder: Path, call: CapturedCall) -> tuple[Path, ExperimentResult]:
    """The repro of what moving a call's inputs does, and that."""
    found = replay.experiments(call, replays=20, budget=Budget(20.0), arms=("moved",))
    moved = found.arm("moved")
    return written(folder / "repro", call, found.arm("repeat"), moved), moved


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is filled through glibc")
def test_uninitialised_memory_is_reproduced_by_poison(tmp_path: Path) -> None:
    probabilities = torch.randn(50, 16, 20).log_softmax(2)
    targets = torch.randint(1, 20, (16, 30))
    call = captured(aten._ctc_loss.default, probabilities, targets, [20] * 16, [3] * 16)
    folder = written(tmp_path / "repro", call, ExperimentResult("poison", "call", trials=20, differing=20, distinct=2))
    assert ran(folder) == "in a fresh process 20 of 20 calls differ"
    twin = captured(aten._ctc_loss.default, probabilities, targets, [50] * 16, [30] * 16)
    assert (
        run_here(written(tmp_path / "twin", twin, ExperimentResult("poison", "call", 20, 20, 2, seconds=0.5)))[0] == 0
    )


@pytest.mark.parametrize("arm", ["busy", "fresh_memory"])
def test_other_surroundings_of_a_call_that_agrees_anyway(arm: str, tmp_path: Path) -> None:
    call = captured(aten.add.Tensor, torch.randn(30), torch.randn(30))
    code, names = run_here(
        written(tmp_path / "repro", call, ExperimentResult(arm, "call", trials=20, differing=1, seconds=0.2))
    )
    assert (code, names["done"]) == (0, 25)


DEFINITION = """
import numpy
import torch

_NOISE = numpy.random.default_rng()


@torch.library.custom_op("{name}::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + float(_NOISE.normal())
"""


@pytest.mark.slow
def test_custom_op_is_reproduced_with_its_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_ops.py"
    file.write_text(DEFINITION.format(name="hashbench_repro"))
    ops.load(str(file))
    call = captured(torch.ops.hashbench_repro.noisy.default, torch.ones(3))
    folder = written(tmp_path / "repro", call, REPEAT)
    definition = ops.definition_of(call.func)
    assert ops.definition_of(aten.add.Tensor) is None
    assert definition is not None
    assert definition.file == file
    text = (folder / "repro.py").read_text()
    assert "file my_ops.py" in text
    assert replay_command(folder) == f"hashbench replay --import my_ops.py {folder}"
    assert str(tmp_path) not in text + (folder / "REPORT.md").read_text() + (folder / "call.json").read_text()
    monkeypatch.setattr("sys.argv", ["repro.py"])
    assert run_here(folder)[0] == "Say what defines the op; see the top of this file."
    assert differs(ran(folder, definition=definition.argument))


def test_settings_of_the_call_are_in_force(tmp_path: Path) -> None:
    call = captured(aten.put_.default, torch.zeros(4), torch.tensor([0, 0]), torch.ones(2))
    call.settings["deterministic_algorithms"] = "on"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        run_here(written(tmp_path / "repro", call, REPEAT))


def test_script_that_hangs_is_stopped(tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", aliased())
    (folder / "repro.py").write_text("import time; time.sleep(60)")
    assert run_in_fresh_process(folder, timeout=0.5) == "timeout after 0.5 s"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os._exit(1)", "failed: exit code 1"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('it needs an op')", "failed: it needs an op"),
        ("print('3 of 4 calls differ'); 1 / 0", "failed: ZeroDivisionError: division by zero"),
    ],
    ids=["without a word", "with an exception", "with a message", "after it printed words like ours"],
)
def test_script_that_ends_otherwise_has_failed(source: str, said: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", aliased())
    (folder / "repro.py").write_text(source)
    assert ran(folder) == said


# ------------------------------------------------------------------------------------------------ on an accelerator


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_atomic_additions_of_a_gpu_are_reproduced(tmp_path: Path) -> None:
    index = torch.randint(0, 20, (500_000,), device="cuda")
    call = captured(aten.scatter_add.default, torch.zeros(20, device="cuda"), 0, index, torch.randn(500_000).cuda())
    assert differs(ran(written(tmp_path / "repro", call, REPEAT)))


# ------------------------------------------------------------------------------------------------------- its texts


# ----------------------------------------------------------------------------------------------- whole or not at all


def test_repro_replaces_an_older_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "repro", aliased())
    (folder / "notes").write_text("old")
    written(folder, adding_rows())
    assert sorted(path.name for path in folder.iterdir()) == ["REPORT.md", "call.json", "repro.py", "tensors.pt"]
    assert call_file.read(folder).call.op == "aten.index_put_.default"
    assert [path.name for path in tmp_path.iterdir()] == ["repro"]


@pytest.mark.parametrize("full", [False, True], ids=["a call that cannot be written", "a disk that is full"])
def test_what_fails_leaves_the_older_repro(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "repro", aliased())
    if full:
        no_space = OSError(28, "No space left on device")
        monkeypatch.setattr("hashbench.core.diagnose.repro.script.source", mock.Mock(side_effect=no_space))
    call = adding_rows() if full else captured(aten.add.Tensor, TwoTensor(torch.ones(2), torch.ones(2)), 1)
    said = "No space" if full else r"the call of aten\.add\.Tensor cannot be written to a file"
    with pytest.raises(OSError if full else HashbenchError, match=said):
        written(folder, call)
    assert call_file.read(folder).call.op == "aten.add_.Tensor"
    assert [path.name for path in tmp_path.iterdir()] == ["repro"]
