"""The text of ``repro.py``: its header, devices, settings, the experiment that it repeats, and how often."""

from __future__ import annotations

import ast
import dataclasses
import py_compile
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from repro_helpers import adding_rows, aten, captured, said_of

from hashbench.core.catalog import EXPERIMENTS, places
from hashbench.core.diagnose.calls.call import CapturedCall, Memory
from hashbench.core.diagnose.replay.controls.memory import requests
from hashbench.core.diagnose.replay.methods import METHODS
from hashbench.core.diagnose.repro import script
from hashbench.core.records import ExperimentResult
from hashbench.core.run.settings import preserved
from tests.core.diagnose.repro.writing import REPEAT, differs, ran, written


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
def test_script_for_a_gpu_names_its_device_once(arm: str, tmp_path: Path) -> None:
    text = text_of(on_device(adding_rows(), "cuda:1", CUBLAS_WORKSPACE_CONFIG=":4096:8"), arm)
    (tmp_path / "repro.py").write_text(text)
    py_compile.compile(str(tmp_path / "repro.py"), doraise=True)
    assert 'DEVICE = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"\ntorch.cuda.set_device(DEVICE)\n' in text
    assert text.count('"cuda:1"') == 1
    assert "place(0, 0, device=DEVICE, move=moves[0])" in text
    assert not re.search(r"\{[{%#]|[}%#]\}", text)


def test_cublas_workspace_is_set_before_torch() -> None:
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
def test_tf32_is_set_by_consistent_names(settings: dict[str, str], statements: list[str]) -> None:
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


def test_a_script_fills_the_blocks_that_the_arm_fills(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_allocation_is_shown_by_poison() -> None:
    shown = said_of(ExperimentResult("poison", "pair", 20, 20, 2, seconds=0.1)).evidence
    assert script.plan(shown).variant == "repeat", "of a kernel that computes"
    assert shown.call is not None
    allocating = dataclasses.replace(shown, call=dataclasses.replace(shown.call, allocation=True))
    assert script.plan(allocating) == script.Plan("poison", 50)


def test_calls_in_new_memory_fit_into_memory() -> None:
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


def test_experiments_with_a_demo_have_a_script() -> None:
    named = {name for name, _ in places(EXPERIMENTS.values(), "call")}
    assert named == {"repeat", *METHODS}
    assert {name for name in named if EXPERIMENTS[name].demo} == set(script.SHOWING)
