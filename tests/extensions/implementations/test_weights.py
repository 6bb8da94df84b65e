"""Two checkpoints, two models in memory, and the page that shows them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command_helpers import Main

import hashbench
from hashbench.core.finding import document
from hashbench.extensions.implementations.weights import compare_checkpoints, compare_models
from hashbench.testing import CheckFailedError, assert_same_weights

PAGE = Path(hashbench.__file__).parents[1] / "docs" / "weights.md"


def saved(folder: Path, **states: dict[str, torch.Tensor]) -> list[Path]:
    paths = []
    for name, state in states.items():
        paths.append(folder / f"{name}.safetensors")
        safetensors.torch.save_file(state, paths[-1])
    return paths


@pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")
def test_the_page_shows_what_its_program_leads_to(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    command, shown = re.findall(r"^```console\n\$ hashbench (.+?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Path("make.py").write_text(re.findall(r"```python\n(# make.py.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    runpy.run_path("make.py")
    done = main(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (1, shown.split())


@pytest.mark.parametrize(("change", "code"), [(0.0, 0), (1.0, 1)])
def test_the_exit_code_is_the_verdict(change: float, code: int, main: Main, tmp_path: Path) -> None:
    state = {"w": torch.randn(9, 9), "b": torch.zeros(9)}
    saved(tmp_path, a=state, b={"other": (state["w"].t() + change).contiguous(), "zeros": torch.zeros(3)})
    flags = ("--json", "--html", "page.html")
    done = main("numeric", "--weights", "a.safetensors", "b.safetensors", *flags, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (done.returncode, found["equal"], found["differs"]) == (code, code == 0, code == 1)
    assert found["constants"] == {"a": 1, "b": 1}
    assert "other" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_only_repeated_values_are_no_proof(main: Main, tmp_path: Path) -> None:
    saved(tmp_path, a={"w": torch.ones(9)}, b={"w": torch.ones(9)})
    done = main("numeric", "--weights", "a.safetensors", "b.safetensors", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing but repeated values" in done.stdout


def test_quantized_weights_are_not_called_different(tmp_path: Path) -> None:
    w = torch.randn(16, 16)
    finding = compare_checkpoints(*saved(tmp_path, a={"w": w}, b={"w": (w * 40).to(torch.int8), "s": torch.ones(1)}))
    assert (finding.equal, finding.differs) == (False, False)
    assert "such dtypes are not compared" in str(finding)


def test_the_table_has_as_many_lines_as_are_asked_for(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(8, 8) for number in range(9)}
    finding = compare_checkpoints(*saved(tmp_path, a=state, b=state), limit=4)
    assert finding.table is not None
    assert len(finding.table.rows) == 4
    assert "The table has 4 of 9 lines: --lines 9 shows all" in str(finding)
    assert len(document(finding)["matches"]) == 9


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--weights a.pt b.pt", "it is a pickle, and to read one runs the code in it"),
        ("--weights none b.safetensors", "cannot read none: it does not exist. Check the path."),
        ("--weights one", "expected 2 arguments"),
        ("--weights a b --trace", "--weights cannot be combined with --trace"),
        ("--weights a b --atol 1", "--weights cannot be combined with --atol"),
        ("two.py --weights a b", "not allowed with argument"),
        ("", "FILE.py"),
    ],
)
def test_bad_input_is_one_line(command: str, said: str, main: Main, tmp_path: Path) -> None:
    done = main("numeric", *command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_models_are_compared_in_memory_and_not_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = {name: tensor.t().bfloat16() for name, tensor in before.items() if tensor.dim() == 2}
    assert compare_models(model, {**half, "b": before["0.bias"], "one": torch.ones(3), "zero": torch.zeros(2)}).equal
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_failed_check_names_the_tensor() -> None:
    w = torch.randn(8, 8)
    assert_same_weights({"w": w}, {"x": w.t()})
    with pytest.raises(CheckFailedError, match=r"w / x: different values"):
        assert_same_weights({"w": w}, {"x": w + torch.eye(8)})
    with pytest.raises(CheckFailedError, match="on the meta device, whose elements are not read"):
        assert_same_weights({"w": w}, {"x": torch.empty(8, 8, device="meta")})
    with pytest.raises(CheckFailedError, match="it has none"):
        assert_same_weights({}, {"x": w})
