"""``hashbench numeric --kernel`` on a user's files, as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_helpers import Main

import hashbench
from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.extensions.kernels.file import NamedFunction, load_kernel

Numeric = Callable[..., tuple[int, str, str]]

KERNELS = """
import torch

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        return torch.tanh(x) * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - torch.tanh(x) ** 2) * 1.01, None

def right(x, factor=1.0):
    return (torch.exp(2 * x.double()) - 1).div(torch.exp(2 * x.double()) + 1).to(x.dtype) * factor

def wrong(x, factor=1.0):
    return torch.tanh(x) * factor * 1.01

def only_float32(x, factor=1.0):
    assert x.dtype is torch.float32, "float32 alone"
    return torch.tanh(x) * factor

def inputs():
    print("inputs are made")
    return torch.randn(5, 24)

def by_name():
    return {"x": torch.randn(5, 24), "factor": 2.0}

def wrong_inputs():
    return (torch.randn(3),)

def ends(x, factor=1.0):
    raise SystemExit(0)

NUMBER = 3
"""
REFERENCE = "import torch\ndef tanh(x, factor=1.0):\n    return torch.tanh(x) * factor\n"
QUICK = ("--without", "sizes,strides,offset,large,tiny,spikes,integers,zeros,nan,inf,denormals,float32")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("kernels.py").write_text(KERNELS, encoding="utf-8")
    Path("plain.py").write_text(REFERENCE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def numeric(files: Path, capsys: pytest.CaptureFixture[str]) -> Numeric:  # noqa: ARG001 – files are made
    """Runs the command on a kernel by its name: the exit code, and what it printed on both streams."""

    def run(name: str, *options: str) -> tuple[int, str, str]:
        words = ["--kernel", name if ":" in name else f"kernels.py:{name}", "--reference", "plain.py:tanh"]
        code = cli.main(["numeric", *words, *options])
        printed = capsys.readouterr()
        return code, " ".join(printed.out.split()), printed.err

    return run


def test_a_right_kernel_is_within_rounding(numeric: Numeric) -> None:
    code, out, err = numeric("right", *QUICK)
    assert (code, err) == (0, "")
    assert "Within rounding" in out
    assert "inputs are made" in out
    assert "Next:" not in out


def test_a_wrong_kernel_exits_with_1_and_its_page_has_a_picture(numeric: Numeric) -> None:
    code, out, _ = numeric("wrong", *QUICK)
    assert code == 1
    assert "Wrong" in out
    assert out.endswith("--html wrong.html")
    code, out, _ = numeric("wrong", *QUICK, "--inputs", "kernels.py:inputs", "--html", "page.html")
    assert code == 1
    assert "Next:" not in out
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 1
    assert "kernels.py:wrong and plain.py:tanh" in page


def test_the_next_command_is_the_same_with_a_page(numeric: Numeric) -> None:
    options = ["--inputs=kernels.py:inputs", "--approximate=1e-09", "--dtypes=float32", "--backward", "--seed=7"]
    _, out, _ = numeric("wrong", *options, *QUICK)
    again = shlex.split(out.rpartition("Next: ")[2])
    assert again[:2] == ["hashbench", "numeric"]
    assert {*options} < {*again}
    parsed = cli._parser().parse_args(again[1:])
    assert (str(parsed.kernel), str(parsed.html)) == ("kernels.py:wrong", "wrong.html")
    assert parsed.without == tuple(QUICK[1].split(","))


def test_gradients_are_judged_if_asked(numeric: Numeric) -> None:
    assert numeric("Scaled", *QUICK)[0] == 0
    code, out, _ = numeric("Scaled", "--backward", *QUICK)
    assert code == 1
    assert "Wrong gradient of input 0: " in out
    assert numeric("Scaled.apply", *QUICK)[0] == 0


def test_a_claimed_approximation_is_right(numeric: Numeric) -> None:
    assert numeric("wrong", "--approximate", "0.02", *QUICK)[0] == 0


def test_dtypes_have_a_row_each(numeric: Numeric) -> None:
    code, out, _ = numeric("only_float32", "--dtypes", "float32,float16", "--json", *QUICK)
    document = json.loads(out)
    outcomes = {dtype: each["outcome"] for dtype, each in document["dtypes"].items()}
    assert outcomes["float32"] == "within rounding"
    assert outcomes["float16"] != "within rounding"
    assert code != 0
    assert document["dtypes"]["float32"]["dtype"] == "float32"
    assert [row[0] for row in document["table"]["rows"]] == ["float32", "float16"]


def test_json_is_all_that_is_on_standard_output(numeric: Numeric) -> None:
    code, out, err = numeric("wrong", "--json", "--inputs", "kernels.py:inputs", *QUICK)
    document = json.loads(out)
    assert (code, document["outcome"], document["differs"]) == (1, "wrong", True)
    assert "inputs are made" in err


def test_what_is_left_out_is_named(numeric: Numeric) -> None:
    _, out, _ = numeric("right", "--json", *QUICK)
    variations = {each["name"]: each["outcome"] for each in json.loads(out[out.index("{") :])["variations"]}
    assert {variations[name] for name in QUICK[1].split(",")} == {"off"}
    assert variations["given"] == "within rounding"


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kernel", "options", "said"),
    [
        ("none.py:f", "", "cannot check none.py: it does not exist. Check the path."),
        ("right", "--inputs none.py:f", "cannot check none.py: it does not exist"),
        ("rigth", "", "it has no function rigth. It has Scaled, right, wrong, only_float32, inputs, by_name"),
        ("Scaled.aply", "", "it has no function Scaled.aply"),
        ("ends", "", "cannot judge kernels.py:ends: it, or its reference, ended the program with 0"),
        ("NUMBER", "", "its NUMBER is a int, not a function"),
        ("plain.py:tanh", "", "it has no function tanh_inputs, and none inputs. Write one that returns"),
        ("right", "--without sices", "there is no variation 'sices'"),
        ("right", "--html /dev/null/f", "cannot write /dev/null/f"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_line(numeric: Numeric, kernel: str, options: str, said: str) -> None:
    code, _, err = numeric(kernel, *options.split())
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kernel kernels.py --reference plain.py:tanh", "must be a file and a function in it, as kernels.py:softmax"),
        ("--kernel :f --reference plain.py:tanh", "must be a file and a function in it"),
        ("--kernel kernels.py:a-b --reference plain.py:tanh", "must be a file and a function in it"),
        ("--kernel kernels.py:right", "--kernel requires --reference"),
        ("--kernel kernels.py:right --reference plain.py:tanh --dtypes bfloat", "Did you mean bfloat16?"),
        ("--kernel kernels.py:right --reference plain.py:tanh --dtypes ,", "must name a dtype"),
        ("--kernel kernels.py:right --reference plain.py:tanh --approximate -1", "must be >= 0, got -1"),
        ("--kernel kernels.py:right --reference plain.py:tanh --rtol 1", "--kernel cannot be combined with --rtol"),
        ("plain.py --backward", "--backward requires --kernel"),
    ],
)
@pytest.mark.usefixtures("files")
def test_a_wrong_command_line_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["numeric", *words.split()]) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- inputs


def named(text: str) -> NamedFunction:
    path, _, name = text.partition(":")
    return NamedFunction(Path(path), name)


def loaded_inputs(kernel: str, inputs: str = "") -> object:
    loaded = load_kernel(named(kernel), named("plain.py:tanh"), named(inputs) if inputs else None, seed=3)
    return loaded.inputs, dict(loaded.named)


def test_inputs_of_a_kernels_own_come_before_those_of_its_file(files: Path) -> None:
    torch.manual_seed(3)
    assert torch.equal(loaded_inputs("kernels.py:right")[0][0], torch.randn(5, 24))  # type: ignore[index]
    assert loaded_inputs("kernels.py:wrong")[0][0].shape == (3,)  # type: ignore[index]
    (files / "plain.py").write_text(REFERENCE + "def inputs():\n    return [torch.ones(2), 4.0]\n", encoding="utf-8")
    assert loaded_inputs("plain.py:tanh")[0][1] == 4.0  # type: ignore[index]


@pytest.mark.usefixtures("files")
def test_inputs_by_name_are_arguments_by_name() -> None:
    inputs, by_name = loaded_inputs("kernels.py:wrong", "kernels.py:by_name")  # type: ignore[misc]
    assert inputs == ()
    assert set(by_name) == {"x", "factor"}


def test_a_file_that_makes_no_inputs_is_refused(files: Path) -> None:
    (files / "plain.py").write_text(REFERENCE + "def inputs():\n    return None\n", encoding="utf-8")
    with pytest.raises(HashbenchError, match=r"inputs\(\) returned None"):
        loaded_inputs("plain.py:tanh")


@pytest.mark.usefixtures("files")
def test_random_state_is_as_it_was() -> None:
    before = torch.get_rng_state()
    loaded_inputs("kernels.py:right")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("files")
def test_floating_point_tensors_alone_are_cast() -> None:
    Path("kernels.py").write_text(
        "import torch\ndef f(x): return x\n"
        "def inputs():\n"
        "    return torch.ones(2), torch.ones(2, dtype=torch.int64), [torch.ones(1)], {'a': torch.ones(1)}, 3\n"
    )
    loaded = load_kernel(named("kernels.py:f"), named("plain.py:tanh"), None, seed=0).cast("bfloat16")
    x, index, (listed,), by_key, number = loaded.inputs
    assert [each.dtype for each in (x, index, listed, by_key["a"])] == [
        torch.bfloat16,
        torch.int64,
        torch.bfloat16,
        torch.bfloat16,
    ]
    assert number == 3


PAGE = Path(hashbench.__file__).parents[1] / "docs" / "kernels.md"


def said_in(text: str) -> list[str]:
    """The first words of a report, and those of its table, without numbers, some of which the machine decides."""
    table = text.partition("\nVariations of the inputs")[2].partition("\n\n")[0]
    return [" ".join(text.split()[:2]), *re.sub(r"\d[\d.e+-]*|-{2,}", "", table).split()]


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")
def test_the_page_shows_what_its_file_leads_to(main: Main, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (command, shown), *_ = re.findall(r"^```console\n\$ hashbench (.*?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    file = re.findall(r"```python\n(# rms_norm.py.*?)```", text, re.DOTALL)[0]
    (clean,) = re.findall(r"^```text\n(Within rounding.*?)^```", text, re.MULTILINE | re.DOTALL)
    Path("rms_norm.py").write_text(file, encoding="utf-8")
    wrong = main(*shlex.split(command), "--seconds", "300", cwd=tmp_path)
    assert (wrong.returncode, said_in(wrong.stdout)) == (1, said_in(shown))
    assert "variation sizes" in " ".join(wrong.stdout.split())
    whole = "max(1, x.shape[1] // BLOCK)"
    assert whole in file
    Path("rms_norm.py").write_text(file.replace(whole, "-(-x.shape[1] // BLOCK)"), encoding="utf-8")
    right = main(*shlex.split(command), "--seconds", "300", cwd=tmp_path)
    assert (right.returncode, said_in(right.stdout)[0]) == (0, said_in(clean)[0])
