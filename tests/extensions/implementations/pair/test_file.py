"""``hashbench numeric`` on a file of two implementations, as a user types it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import Main

import hashbench
from hashbench import cli

Numeric = Callable[..., tuple[int, str, str]]

PAIR = """
import torch

class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 24))
        self.factor = factor

    def forward(self, x):
        print("runs in", self.training)
        return torch.tanh(x * self.weight) + self.factor

class Rows(Scale):
    def forward(self, x):
        return {"y": self.factor + torch.tanh(self.weight * x.flatten(0, 1))}

def make_a(): return Scale(0.5)
def make_b(): return Rows(0.5)
def inputs(): return (torch.randn(2, 5, 24),)
def outputs_b(result): return result["y"]
"""
WRONG = PAIR.replace("Rows(0.5)", "Rows(0.505)")
LOSS = "def loss_a(result): return result.square().sum()\ndef loss_b(result): return result['y'].square().sum()\n"

FUSED = """
import torch

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(24, 8, bias=False), torch.nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.one(x)) * self.other(x)

class Fused(torch.nn.Module):
    def __init__(self, two):
        super().__init__()
        self.both = torch.nn.Linear(24, 16, bias=False)
        self.both.weight.data = torch.cat([two.one.weight.data, two.other.weight.data])

    def forward(self, x):
        one, other = self.both(x).chunk(2, -1)
        return torch.tanh(one) * other * FACTOR

FACTOR = 1.0
STAGES = ("outputs",)
def before(): return Two()
def after(model): return Fused(model)
def inputs(): return (torch.randn(6, 24),)
"""


@pytest.fixture
def numeric(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Numeric:
    """Runs the command on a file of this content: the exit code, and what it printed on both streams."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(content: str, *options: str) -> tuple[int, str, str]:
        path = tmp_path / "pair.py"
        path.write_text(content, encoding="utf-8")
        code = cli.main(["numeric", str(path), *options])
        printed = capsys.readouterr()
        return code, " ".join(printed.out.split()), printed.err

    return run


def test_a_pair_is_equal(numeric: Numeric) -> None:
    code, out, err = numeric(PAIR)
    assert (code, err) == (0, "")
    assert "Both implementations are equal bit by bit" in out


def test_a_mistake_is_named_on_both_sides_with_its_line(numeric: Numeric, tmp_path: Path) -> None:
    code, out, _ = numeric(WRONG, "--html", str(tmp_path / "page.html"))
    assert code == 1
    assert re.search(
        r"A mistake: aten\.add\.Tensor in Scale \(a, \S*pair\.py:12\) / aten\.add\.Tensor in Rows \(b,", out
    )
    assert "0.5 (a), 0.505 (b)" in out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<details") == 1
    assert re.search(r'<li class="first" title="aten.add.Tensor in Rows"', page)


def test_json_is_all_that_is_on_standard_output(numeric: Numeric) -> None:
    code, out, err = numeric(WRONG, "--json")
    document = json.loads(out)
    assert (code, document["outcome"], document["differs"]) == (1, "mistake", True)
    assert document["parted"][0]["b"]["module"] == "Rows"
    assert "runs in True" in err


def test_gradients_are_compared_with_a_loss_unless_inference_is_asked_for(numeric: Numeric) -> None:
    wrong = LOSS.replace("['y']", "['y'].mul(1.01)")
    assert numeric(PAIR + wrong)[0] == 1
    assert numeric(PAIR + wrong, "--training")[0] == 1
    assert numeric(PAIR + wrong, "--inference")[0] == 0
    code, _, err = numeric(PAIR, "--training")
    assert code == 2
    assert "it has no loss(result), so there are no gradients for --training to compare. Add a function loss" in err


def test_modes_are_those_that_are_asked_for(numeric: Numeric) -> None:
    assert "runs in False" in numeric(PAIR, "--inference")[1]
    assert "runs in True" in numeric(PAIR + LOSS, "--training")[1]


def test_a_transformation_is_compared_the_same_way_if_asked(numeric: Numeric) -> None:
    assert "is equal" not in numeric(FUSED, "--same-function")[1]
    code, out, _ = numeric(FUSED.replace("FACTOR = 1.0", "FACTOR = 1.0001"), "--same-function", "--inference")
    assert code == 1
    assert re.search(r"A mistake: .*Fused \(after, \S*pair\.py:\d+\)", out)


def test_a_trace_of_modules_that_do_not_correspond_blames_by_content(numeric: Numeric) -> None:
    code, out, _ = numeric(FUSED.replace("FACTOR = 1.0", "FACTOR = 1.01"), "--inference", "--trace", "--json")
    document = json.loads(out)
    assert (code, document["first_differences"]) == (1, [])
    (part,) = document["parts"]
    assert part["outcome"] == "mistake"
    assert part["parted"][0]["b"]["op"] == "aten.mul.Tensor"
    same = FUSED.replace("return Fused(model)", "model.one.weight.data += 1; return model")
    (first, *_) = json.loads(numeric(same, "--inference", "--trace", "--json")[1])["first_differences"]
    assert first["name"] == "parameter/one.weight"


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (PAIR.replace("def make_b", "def make_c"), "", "has no function make_b. It needs make_a() and make_b(), and"),
        (PAIR.replace("def inputs", "def others"), "", "it has no function inputs"),
        (PAIR + "loss = 3", "", "its loss is a int, not a function"),
        (PAIR.replace("Rows(0.5)", "Rows()"), "", "make_b() raised TypeError"),
        (PAIR.replace("return Rows(0.5)", "Rows(0.5)"), "", "make_b() returned a value of type NoneType"),
        (PAIR.replace('result["y"]', 'result["z"]'), "", "outputs_b() raised KeyError: 'z'"),
        (PAIR.replace("return (torch.randn(2, 5, 24),)", "pass"), "", "inputs() returned None"),
        (PAIR, "--atol 1", "--atol is not for two implementations: nothing was run. Leave it out"),
        (PAIR, "--html /dev/null/f", "cannot write /dev/null/f"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said(numeric: Numeric, content: str, options: str, said: str) -> None:
    code, _, err = numeric(content, *options.split())
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_model_that_raises_is_named(numeric: Numeric) -> None:
    code, _, err = numeric(PAIR.replace("x.flatten(0, 1)", "x.flatten(0, 1) @ x"))
    assert code == 2
    assert "cannot run (b): it raised RuntimeError: " in err
    assert "(pair.py:" in err


PAGE = Path(hashbench.__file__).parents[1] / "docs" / "implementations.md"


def words_of(text: str) -> list[str]:
    """The words of a text without its numbers, some of which the machine decides."""
    return re.sub(r"\d[\d.e-]*|-{2,}", "", text).split()


@pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")
def test_the_page_shows_what_its_file_leads_to(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^```console\n\$ hashbench numeric pair.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    file = re.findall(r"```python\n(# pair.py.*?)```", text, re.DOTALL)[0]
    Path("pair.py").write_text(file, encoding="utf-8")
    wrong = main("numeric", "pair.py", cwd=tmp_path)
    assert (wrong.returncode, words_of(wrong.stdout)) == (1, words_of(shown))
    Path("pair.py").write_text(file.replace("1e-6", "1e-5"), encoding="utf-8")
    right = main("numeric", "pair.py", cwd=tmp_path)
    (clean,) = re.findall(r"^```text\n(The same function.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert right.returncode == 0
    for part in clean.split("…"):
        assert " ".join(words_of(part)) in " ".join(words_of(right.stdout))
