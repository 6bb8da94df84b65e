"""The repro of a captured call: written whole or not at all, read back as it was, run by a Python with torch alone."""

from __future__ import annotations

import ast
import dataclasses
import py_compile
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import address_ops
import pytest
import torch
from repro_helpers import adding_rows, aten, captured, said_of
from torch.testing._internal.two_tensor import TwoTensor

from hashbench import replay, repro
from hashbench.catalog import EXPERIMENTS, places
from hashbench.errors import HashbenchError
from hashbench.processes import Budget
from hashbench.records import ExperimentResult
from hashbench.replay import ops
from hashbench.replay.call import CapturedCall, Memory, in_force, outcome_of
from hashbench.replay.controls.memory import requests
from hashbench.replay.methods import METHODS
from hashbench.repro import call_file, run_in_fresh_process, script, write_repro
from hashbench.run.settings import preserved

REPEAT = ExperimentResult("repeat", "call", trials=20, differing=20, distinct=21, seconds=0.002)


def written(folder: Path, call: CapturedCall, *arms: ExperimentResult) -> Path:
    """The repro of a call in ``folder``."""
    write_repro(folder, call, said_of(*arms, op=call.op), seen_in="in a test")
    return folder


def ran(folder: Path, **kwargs: Any) -> str:
    return run_in_fresh_process(folder, timeout=600, **kwargs)


def differs(said: str) -> bool:
    """Return True if any call of a repro that ran to its end differed."""
    counted = re.fullmatch(r"in a fresh process (\d+) of \d+ calls differ", said)
    assert counted is not None, said
    return int(counted[1]) > 0


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
    with in_force(call):
        live = call.materialise()
        return outcome_of(live.run(), live)


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
    with in_force(call):
        live = call.materialise()
        expected = names["leaves"]([live.run(), live.tensors])
    assert names["digest"](names["first"]) == names["digest"](expected)


def test_inputs_lie_at_the_addresses_that_they_had(tmp_path: Path) -> None:
    call = at_an_odd_address()
    folder = written(tmp_path / "repro", call, ExperimentResult("repeat", "call", trials=20, seconds=1.0))
    _, names = run_here(folder)
    with in_force(call):
        there = [tensor.data_ptr() % 64 for tensor in call.materialise().tensors]
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
def test_dependence_of_a_kernel_of_torch_is_reproduced_by_moving_where_a_probe_says_so(
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
def test_memory_that_nobody_wrote_is_reproduced_by_poison(tmp_path: Path) -> None:
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
def test_custom_op_is_reproduced_with_the_file_that_defines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def on_device(call: CapturedCall, *devices: str, **settings: str) -> CapturedCall:
    """The call as if its memories, in turn, lay on these devices; its text needs no more of them than their names."""
    memories = []
    for place, memory in enumerate(call.memories):
        content = SimpleNamespace(device=torch.device(devices[place % len(devices)]), nbytes=memory.content.nbytes)
        memories.append(Memory(cast(torch.Tensor, content), memory.alignment))
    return dataclasses.replace(call, memories=tuple(memories), settings={**call.settings, **settings})


def text_of(call: CapturedCall, arm: str = "repeat") -> str:
    """The script, which Python takes."""
    how = script.plan(said_of(ExperimentResult(arm, "call", 20, 20, 2)).evidence)
    text = script.source(call, how, heading="A call.")
    compile(text, "repro.py", "exec")
    return text


@pytest.mark.parametrize("arm", [*script.SHOWING])
def test_script_for_a_gpu_is_python_that_names_its_device_once(arm: str, tmp_path: Path) -> None:
    text = text_of(on_device(adding_rows(), "cuda:1", CUBLAS_WORKSPACE_CONFIG=":4096:8"), arm)
    (tmp_path / "repro.py").write_text(text)
    py_compile.compile(str(tmp_path / "repro.py"), doraise=True)
    assert 'DEVICE = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"\ntorch.cuda.set_device(DEVICE)\n' in text
    assert text.count('"cuda:1"') == 1
    assert "place(0, 0, device=DEVICE, move=moves[0])" in text
    assert not re.search(r"\{[{%#]|[}%#]\}", text)


def test_the_workspace_of_cublas_is_set_before_torch_is_imported_where_there_is_one() -> None:
    before, _, _ = text_of(on_device(adding_rows(), "cuda:0", CUBLAS_WORKSPACE_CONFIG=":16:8")).partition(
        "import torch\n"
    )
    assert 'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"\n' in before
    assert "CUBLAS" not in text_of(on_device(adding_rows(), "cuda:0", CUBLAS_WORKSPACE_CONFIG=""))
    assert "CUBLAS" not in text_of(on_device(adding_rows(), "xpu:0", CUBLAS_WORKSPACE_CONFIG=":16:8"))


@pytest.mark.parametrize(
    ("device", "statement"),
    [
        ("cuda:0", 'DEVICE = "cuda:0"\ntorch.cuda.set_device(DEVICE)\n'),
        ("xpu:2", 'DEVICE = "xpu:2" if torch.xpu.device_count() > 2 else "xpu:0"\ntorch.xpu.set_device(DEVICE)\n'),
        ("mps:0", 'device="mps:0"'),
    ],
)
def test_each_kind_of_device_is_chosen_in_its_own_way(device: str, statement: str) -> None:
    text = text_of(on_device(adding_rows(), device))
    assert statement in text
    assert ("DEVICE" in text) == (device != "mps:0")


def test_a_device_among_the_arguments_is_the_scripts_own() -> None:
    call = dataclasses.replace(captured(aten.full.default, [2], 7.5), kwargs={"device": torch.device("cuda:1")})
    text = text_of(call)
    assert "device=torch.device(DEVICE)" in text
    assert 'torch.device("cuda:1")' in script.expression(call)


OLDER = {"cudnn.allow_tf32": "False", "cuda.matmul.allow_tf32": "False"}
NEWER = {"cudnn.conv.fp32_precision": "ieee", "cudnn.rnn.fp32_precision": "ieee", "cuda.matmul.fp32_precision": "tf32"}


@pytest.mark.parametrize(
    ("settings", "statements"),
    [
        pytest.param({**OLDER, **NEWER}, ["torch.backends.cudnn.allow_tf32 = False"], id="both agree: the older names"),
        pytest.param(
            NEWER,
            [
                'torch.backends.cudnn.conv.fp32_precision = "ieee"',
                'torch.backends.cudnn.rnn.fp32_precision = "ieee"',
                'torch.backends.cuda.matmul.fp32_precision = "tf32"',
            ],
            id="torch could not tell the older ones: the newer names",
        ),
        pytest.param(
            {**OLDER, "cuda.matmul.allow_tf32": "True", "float32_matmul_precision": "medium"},
            [
                "torch.backends.cudnn.allow_tf32 = False",
                "torch.backends.cuda.matmul.allow_tf32 = True",
                'torch.set_float32_matmul_precision("medium")',
            ],
            id="the precision of matrix products has the last word",
        ),
    ],
)
def test_tf32_is_as_it_was_by_names_that_do_not_contradict_each_other(
    settings: dict[str, str], statements: list[str]
) -> None:
    known = {name: value for name, value in adding_rows().settings.items() if "tf32" not in name}
    call = on_device(adding_rows(), "cuda:0")
    call = dataclasses.replace(call, settings={**known, **settings})
    found = [line for line in text_of(call).splitlines() if "tf32" in line or "precision" in line]
    assert found == statements
    with preserved():  # torch takes them in this order without an objection
        for line in found:
            exec(line)
        assert torch.backends.cuda.matmul.fp32_precision in ("tf32", "ieee", "none")


def test_implementations_of_attention_are_as_they_were() -> None:
    call = on_device(adding_rows(), "cuda:0", **{"sdp.flash": "False", "sdp.cudnn": "False"})
    text = text_of(call)
    assert "torch.backends.cuda.enable_flash_sdp(False)\ntorch.backends.cuda.enable_cudnn_sdp(False)\n" in text
    assert "enable_math_sdp" not in text


def test_what_fills_free_blocks_in_a_script_asks_as_the_arm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_type": "small", "device": 0, "blocks": [{"state": "inactive", "size": 2**21 - 512}]},
        {
            "segment_type": "large",
            "device": 0,
            "blocks": [{"state": "inactive", "size": size} for size in (512, 2**23)],
        },
        {"segment_type": "large", "device": 1, "blocks": [{"state": "inactive", "size": 2**24}]},
        {"segment_type": "large", "device": 0, "blocks": [{"state": "active_allocated", "size": 2**25}]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(torch, "full", lambda size, byte, **_: asked.append((size[0], byte)))
    names: dict[str, Any] = {"torch": torch, "DEVICE": "cuda:0"}
    script_of_it = ast.parse(text_of(on_device(adding_rows(), "cuda:0"), "poison"))
    (fill,) = (node for node in script_of_it.body if isinstance(node, ast.FunctionDef) and node.name == "fill_memory")
    exec(ast.unparse(fill), names)
    names["fill_memory"](None)
    assert asked == []
    names["fill_memory"](0x40)
    expected = requests([{**segment, "stream": 0} for segment in segments], device=0, stream=0)
    assert asked == [(size, 0x40) for size in expected]


def test_an_allocation_is_shown_by_other_content_in_memory_as_often_as_there_is_time() -> None:
    shown = said_of(ExperimentResult("poison", "pair", 20, 20, 2, seconds=0.1)).evidence
    assert script.plan(shown).variant == "repeat", "of a kernel that computes"
    assert shown.call is not None
    allocating = dataclasses.replace(shown, call=dataclasses.replace(shown.call, allocation=True))
    assert script.plan(allocating) == script.Plan("poison", 50)


def test_calls_in_memory_of_their_own_are_no_more_than_memory_holds() -> None:
    arm = ExperimentResult("fresh_memory", "call", 20, 20, 2)
    how = script.plan(said_of(arm).evidence)
    call = adding_rows()
    assert f"CALLS = {how.calls} " in script.source(call, how, heading="A call.")
    large = on_device(call, "cuda:0")
    for memory in large.memories:
        memory.content.nbytes = 2**29  # type: ignore[misc]
    assert "CALLS = 2 " in script.source(large, how, heading="A call.")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("arm", [*script.SHOWING])
def test_script_runs_on_a_gpu(arm: str, tmp_path: Path) -> None:
    call = captured(aten.add.Tensor, torch.randn(1000, device="cuda")[3:], torch.randn(997, device="cuda"))
    folder = written(tmp_path / "repro", call, ExperimentResult(arm, "call", 20, 1, 2, seconds=0.2))
    assert not differs(ran(folder))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_atomic_additions_of_a_gpu_are_reproduced(tmp_path: Path) -> None:
    index = torch.randint(0, 20, (500_000,), device="cuda")
    call = captured(aten.scatter_add.default, torch.zeros(20, device="cuda"), 0, index, torch.randn(500_000).cuda())
    assert differs(ran(written(tmp_path / "repro", call, REPEAT)))


# ------------------------------------------------------------------------------------------------------- its texts


def on_call(name: str, trials: int, differing: int = 0, distinct: int = 0, **more: float) -> ExperimentResult:
    return ExperimentResult(name, "call", trials, differing, distinct, **more)  # type: ignore[arg-type]


AGREES = on_call("repeat", 20)
SHOWN: dict[str, tuple[tuple[ExperimentResult, ...], tuple[str, int]]] = {
    "always": ((REPEAT,), ("repeat", 500)),
    "one in twenty": ((on_call("repeat", 200, 10, 3, seconds=0.001),), ("repeat", 500)),
    "one in a hundred": ((on_call("repeat", 1000, 10, 3, seconds=0.001),), ("repeat", 919)),
    "one in two thousand": ((on_call("repeat", 2000, 1, 2, seconds=0.0001),), ("repeat", 5000)),
    "a slow call": ((on_call("repeat", 20, 20, 21, seconds=3.0),), ("repeat", 20)),
    "never": ((on_call("repeat", 20, 0, 1, seconds=0.001),), ("repeat", 500)),
    "nothing was run": ((), ("repeat", 500)),
    "only when moved": ((AGREES, on_call("moved", 20, 3)), ("moved", 500)),
    "only on a busy machine": ((AGREES, on_call("busy", 20, 3)), ("busy", 500)),
    "only beside a busy stream": ((AGREES, on_call("busy_stream", 20, 3)), ("busy_stream", 500)),
    "in other memory": ((AGREES, on_call("fresh_memory", 20, 3)), ("fresh_memory", 500)),
    "follows the poison, too": ((on_call("repeat", 20, 3, 2), on_call("poison", 20, 20)), ("poison", 500)),
    "the whole model, not the call": ((AGREES, ExperimentResult("moved", "pair", 20, 3)), ("repeat", 500)),
}


@pytest.mark.parametrize(("arms", "expected"), SHOWN.values(), ids=SHOWN)
def test_way_to_show_it(arms: tuple[ExperimentResult, ...], expected: tuple[str, int]) -> None:
    plan = script.plan(said_of(*arms).evidence)
    assert (plan.variant, plan.calls) == expected


MOVES = {
    "those that showed it": (((None, 4), (None, 16), (1, 8)), [[4, 4], [16, 16], [0, 8]]),
    "any, where nobody says": ((), [[8, 8], [16, 16], [32, 32], [48, 48], [64, 64]]),
}


@pytest.mark.parametrize(("found", "moves"), MOVES.values(), ids=MOVES)
def test_moves(found: tuple[tuple[int | None, int], ...], moves: list[list[int]]) -> None:
    call = captured(aten.add.Tensor, torch.zeros(3, dtype=torch.float64), torch.zeros(3))
    assert script.moves_of(call, found) == moves


ALL_VARIANTS = ["repeat", "moved", "poison", "busy", "fresh_memory"]


@pytest.mark.parametrize("arm", ALL_VARIANTS)
def test_script_is_short_and_imports_torch_alone(arm: str, tmp_path: Path) -> None:
    text = (
        written(tmp_path / "repro", adding_rows(), ExperimentResult(arm, "call", 20, 20, 2)) / "repro.py"
    ).read_text()
    tree = ast.parse(text)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    assert sum(1 for line in text.splitlines() if line.strip()) < 110
    assert max(map(len, text.splitlines())) <= 120


def test_every_experiment_on_a_call_is_implemented_and_those_with_a_demo_have_a_script() -> None:
    named = {name for name, _ in places(EXPERIMENTS.values(), "call")}
    assert named == {"repeat", *METHODS}
    assert {name for name in named if EXPERIMENTS[name].demo} == set(script.SHOWING)


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
        monkeypatch.setattr("hashbench.repro.script.source", mock.Mock(side_effect=no_space))
    call = adding_rows() if full else captured(aten.add.Tensor, TwoTensor(torch.ones(2), torch.ones(2)), 1)
    said = "No space" if full else r"the call of aten\.add\.Tensor cannot be written to a file"
    with pytest.raises(OSError if full else HashbenchError, match=said):
        written(folder, call)
    assert call_file.read(folder).call.op == "aten.add_.Tensor"
    assert [path.name for path in tmp_path.iterdir()] == ["repro"]
