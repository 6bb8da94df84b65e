"""Dumps of transformers' own debugger beside those of an engine: with a mistake in it, and without."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from command_helpers import Main

import hashbench
from hashbench.core.finding import document
from hashbench.extensions.implementations.dumps import sketch
from hashbench.extensions.implementations.dumps.compare import compare_dumps, judge_dumps
from hashbench.extensions.implementations.dumps.finding import HOW

pytest.importorskip("transformers")

from tests.extensions.implementations.dumps import engines

PAGE = Path(hashbench.__file__).parents[1] / "docs" / "dumps.md"

LOCAL = [fault for fault, first in engines.FAULTS.items() if "layers.1" in first]
"""Faults of one layer."""

Debugged = Callable[[torch.dtype], Path]


@pytest.fixture(scope="session")
def debugged(tmp_path_factory: pytest.TempPathFactory) -> Debugged:
    """Return the dump of a dtype, made once."""
    made: dict[torch.dtype, Path] = {}

    def of(dtype: torch.dtype) -> Path:
        if dtype not in made:
            made[dtype] = engines.debugged(tmp_path_factory.mktemp("debugged"), dtype)
        return made[dtype]

    return of


def found(a: Path, b: Path, **keywords: Any) -> dict[str, Any]:
    return document(compare_dumps(a, b, **keywords))


@pytest.mark.parametrize("suffix", engines.SAVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_engine_without_a_mistake_has_partners_of_all(
    dtype: torch.dtype, suffix: str, debugged: Debugged, tmp_path: Path
) -> None:
    if (dtype, suffix) == (torch.bfloat16, ".npy"):
        return  # NumPy has no bfloat16
    both = found(debugged(dtype), engines.saved(tmp_path / "b", engines.engine(dtype), suffix))
    assert both["headline"] == "What both dumped agrees: 27 of 27 tensors of B have a partner in A"
    assert (both["differs"], both["alone"]["b"], both["first"]) == (False, [], {"a": None, "b": None})
    pairs = {pair["b"]: pair for pair in both["pairs"]}
    parts = [f"model.layers.2.self_attn.{name}_proj_outputs" for name in "qkv"]
    assert (pairs["0018_layers.2.qkv"]["how"], pairs["0018_layers.2.qkv"]["a"]) == ("fused", parts)
    assert pairs["0000_embed"]["how"] == "bit by bit"
    assert pairs["0017_layers.2.attn_norm"]["a"] == ["model.layers.2.input_layernorm_outputs"]


@pytest.mark.parametrize(
    ("fault", "layer", "dtype"),
    [
        *((fault, 1, torch.float32) for fault in engines.FAULTS),
        *(pytest.param(fault, layer, torch.float32, marks=pytest.mark.slow) for fault in LOCAL for layer in (0, 2)),
        *((fault, 1, torch.bfloat16) for fault in ("norm", "stale", "mask", "swapped", "down", "no residual")),
    ],
)
def test_the_first_tensor_of_a_mistake_is_named(
    fault: str, layer: int, dtype: torch.dtype, debugged: Debugged, tmp_path: Path
) -> None:
    b = engines.saved(tmp_path / "b", engines.engine(dtype, fault, layer))
    both = found(debugged(dtype), b)
    expected = engines.FAULTS[fault].replace("layers.1", f"layers.{layer}")
    assert both["first"]["b"]["name"].endswith(f"_{expected}")
    assert both["headline"] == f"{both['first']['b']['name']} of B is the first without a partner in A"
    assert (both["equal"], both["differs"]) == (False, True)


def test_both_sides_are_said_with_what_agrees_and_what_is_near(debugged: Debugged, tmp_path: Path) -> None:
    finding = compare_dumps(debugged(torch.float32), engines.saved(tmp_path / "b", engines.engine(fault="down")))
    text = " ".join(str(finding).split())
    assert "agrees before it: 0015_layers.1.act / model.layers.1.mlp.down_proj_inputs_args_0" in text
    assert "nearest in A: model.layers.1.mlp.down_proj_outputs" in text
    assert "first of A: model.layers.1.mlp.down_proj_outputs, float32[2, 11, 64]" in text
    assert "64 times the unit roundoff of float32 (6e-08), the lowest dtype here" in text
    assert "order of numbers in the names" in text
    assert "rounding grew" not in text.lower()


def test_the_lowest_dtype_of_both_sides_decides(debugged: Debugged, tmp_path: Path) -> None:
    b = engines.saved(tmp_path / "b", engines.engine(torch.bfloat16))
    both = found(debugged(torch.float32), b)
    assert (both["dtype"], both["tolerance"], both["alone"]["b"]) == ("bfloat16", 8 * 2**-8, [])
    exact = found(debugged(torch.float32), b, rtol=1e-6)
    assert (exact["differs"], exact["first"]["b"]["name"]) == (True, "0000_embed")
    assert "as asked for" in exact["facts"]["tolerance"]


def test_the_same_dump_is_equal_bit_by_bit(debugged: Debugged) -> None:
    both = found(debugged(torch.float32), debugged(torch.float32))
    assert both["headline"] == "Every tensor of A and of B has a partner, equal bit by bit"
    assert (both["equal"], {pair["how"] for pair in both["pairs"]}) == (True, {"bit by bit"})


def test_layers_that_the_debugger_left_out_are_compared(debugged: Debugged, tmp_path: Path) -> None:
    pruned = engines.debugged(tmp_path / "pruned", prune=True)
    verdict = judge_dumps(debugged(torch.float32), pruned)
    assert [each.name for each in verdict.a.sketches] == [each.name for each in verdict.b.sketches]  # in order, too
    assert "31 tensors beside the tree" in str(compare_dumps(debugged(torch.float32), pruned))
    faulty = engines.saved(tmp_path / "b", engines.engine(fault="down"))
    assert found(pruned, faulty)["first"]["b"]["name"] == "0016_layers.1.down"


def test_names_without_an_order_are_led_by_the_other_side(debugged: Debugged, tmp_path: Path) -> None:
    b = engines.saved(tmp_path / "b", engines.engine(fault="down"), numbered=False)
    for place, file in enumerate(sorted(b.iterdir(), reverse=True)):
        os.utime(file, (place, place))  # copied in another order
    both = found(debugged(torch.float32), b)
    assert both["headline"] == "model.layers.1.mlp.down_proj_outputs of A is the first without a partner in B"
    assert both["order"]["b"] == "of names"
    alone = compare_dumps(engines.saved(tmp_path / "a", engines.engine(), numbered=False), b)
    assert "is not that of calls" in str(alone) or alone.differs


def test_only_the_same_steps_are_compared(tmp_path: Path) -> None:
    x, y = (torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for side, steps in (("a", (x, y)), ("b", (y, x))):
        for step, tensor in enumerate(steps):
            folder = tmp_path / side / f"step_{step}"
            folder.mkdir(parents=True)
            np.save(folder / "0_layer.npy", tensor.numpy())
    assert found(tmp_path / "a", tmp_path / "b")["first"]["b"]["name"] == "step_0/0_layer"
    assert found(tmp_path / "a" / "step_0", tmp_path / "b" / "step_1")["equal"]


def test_what_one_side_alone_dumped_is_no_mistake(debugged: Debugged, tmp_path: Path) -> None:
    extra = [*engines.engine()]
    extra[5:5] = [("extra", torch.randn(22, 17))]
    b = engines.saved(tmp_path / "b", iter(extra))
    both = found(debugged(torch.float32), b)
    assert (both["equal"], both["differs"], both["alone"]["b"]) == (False, False, ["0005_extra"])
    assert "Of B alone: 0005_extra." in both["notes"]


def test_a_difference_that_does_not_last_is_not_called_one(debugged: Debugged, tmp_path: Path) -> None:
    tensors = [(name, 2 * x if name == "layers.1.o" else x) for name, x in engines.engine()]
    both = found(debugged(torch.float32), engines.saved(tmp_path / "b", iter(tensors)))
    assert both["headline"] == "0012_layers.1.o of B has no partner in A, but the last that was computed agrees"
    assert (both["equal"], both["differs"], both["first"]["b"]["again"]) == (False, False, 14)


def test_other_inputs_are_asked_about(debugged: Debugged, tmp_path: Path) -> None:
    noise = ((name, torch.randn_like(x)) for name, x in engines.engine())
    assert "did both have the same inputs" in str(
        compare_dumps(debugged(torch.float32), engines.saved(tmp_path / "b", noise))
    )


def test_a_dtype_without_values_here_is_left_out_and_said(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    safetensors.torch.save_file({"x": x, "y": x.to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    both = found(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert (both["equal"], both["differs"], both["unknown"]) == (False, False, ["a:y", "a:y"])
    assert "of a dtype whose values are not compared" in both["notes"][0]


def test_the_exit_code_is_the_verdict(main: Main, tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    for name, state in {"a": {"x": x}, "b": {"x": x + 1}, "c": {"x": x, "z": torch.rand(3)}}.items():
        torch.save(state, tmp_path / f"{name}.pt")
    for other, code in (("a", 0), ("b", 1), ("c", 2)):
        done = main("numeric", "--dumps", "a.pt", f"{other}.pt", "--json", cwd=tmp_path)
        assert (done.returncode, json.loads(done.stdout)["differs"]) == (code, code == 1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--dumps none b", "cannot read none: it does not exist, so nothing was compared. Check the path."),
        ("--dumps one", "expected 2 arguments"),
        ("--dumps a b --trace", "--dumps cannot be combined with --trace"),
        ("--dumps a b --weights a b", "not allowed with argument"),
    ],
)
def test_a_wrong_command_is_told(command: str, said: str, main: Main, tmp_path: Path) -> None:
    done = main("numeric", *command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")
def test_the_page_shows_what_its_program_leads_to(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    command, shown = re.findall(r"^```console\n\$ hashbench (.+?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Path("make.py").write_text(re.findall(r"```python\n(# make.py.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    with torch._tensor_str.printoptions(), torch.random.fork_rng(devices=[]):
        runpy.run_path("make.py")
    done = main(*command.split(), cwd=tmp_path)
    assert (done.returncode, _words(done.stdout)) == (1, _words(shown))


def _words(report: str) -> list[str]:
    """Return the words and names of a report, without what another processor may round otherwise."""
    ways = {word for way in HOW.values() for word in way.split()}
    return [word for word in report.replace(",", " ").split() if re.search("[a-z]{3}", word) and word not in ways]


def test_tensors_are_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(40, 16)).astype("f4")
    np.save(tmp_path / "x.npy", x)
    whole = judge_dumps(tmp_path / "x.npy", tmp_path / "x.npy").a.sketches[0]
    monkeypatch.setattr(sketch, "CHUNK", 48)
    parts = judge_dumps(tmp_path / "x.npy", tmp_path / "x.npy").a.sketches[0]
    assert parts.digest == whole.digest
    assert parts.moments.agree(whole.moments, 1e-15)
    assert parts.rows is not None
    assert parts.rows.shape == (40, 8)
