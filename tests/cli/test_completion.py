"""``hashbench completion``: scripts that shells take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import Main

from hashbench.cli.completion import SHELLS

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
compopt() { :; }
function=$(complete -p hashbench | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function hashbench "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(main: Main, tmp_path: Path) -> Path:
    """The script for bash, in a file."""
    done = main("completion", "bash", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "hashbench.bash").write_text(done.stdout)
    return tmp_path / "hashbench.bash"


def completed(script: Path, line: str) -> list[str]:
    """What bash offers where the cursor stands at the end of ``line``."""
    words = line.split(" ")
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), *words], cwd=script.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return sorted(filter(None, done.stdout.split("\n")))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hashbench sw", ["sweep"]),
        ("hashbench fingerprint ", ["record", "verify"]),
        ("hashbench sweep --inf", ["--inference"]),
        ("hashbench sweep --inference --tracer na", ["native"]),
        ("hashbench sweep --output zo", ["zoo.py"]),
        ("hashbench sweep --suite hugg", ["huggingface", "huggingface_tiny"]),
        ("hashbench sweep --suite torchvision zo", ["zoo.py"]),
        ("hashbench nightly --suite spec", ["specimens"]),
        ("hashbench completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_bash_completes(line: str, offered: list[str], script: Path) -> None:
    (script.parent / "zoo.py").touch()
    assert completed(script, line) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_all_commands(shell: str, main: Main, tmp_path: Path) -> None:
    done = main("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("sweep", "--batch-size" if shell != "fish" else "-l batch-size", "Override the batch size"):
        assert word in done.stdout or shell == "bash"


def test_without_shtab_the_error_says_what_to_install(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = main("completion", "bash", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "pip install shtab" in done.stderr


def test_another_shell_is_refused(main: Main, tmp_path: Path) -> None:
    done = main("completion", "bsh", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "(choose from bash, zsh, fish). Did you mean bash?" in done.stderr
