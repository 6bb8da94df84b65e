"""What docs/observer.md shows runs as it stands; the recipe for CI in one process after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hashbench.core.diagnose.fresh_process import run_python
from hashbench.core.errors import HashbenchError
from hashbench.core.run.settings import preserved

PAGE = Path(__file__).parents[3] / "docs" / "observer.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
RECIPE = next(text for text in EXAMPLES if "observer_ci.py" in text)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(EXAMPLES[number], f"{PAGE.name} example {number}", "exec"), names)
    assert names.get("has_mismatches") in (None, False)


def recipe(*, rate: str = "0.1") -> str:
    return RECIPE.replace("LEARNING_RATE = 0.1", f"LEARNING_RATE = {rate}")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_the_recipe_for_ci_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for what in ("generate", "test"):
        done = run_python(RECIPE, what, seconds=300)
        assert (done.status, done.stderr) == (0, "")


def test_the_recipe_without_a_reference_fails_and_update_makes_the_change_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(what: str, *, rate: str = "0.1") -> int:
        names: dict[str, Any] = {"__name__": "recipe"}
        exec(compile(recipe(rate=rate), "observer_ci.py", "exec"), names)
        with preserved():
            found: int = names["main"](what)
        return found

    with pytest.raises(HashbenchError, match="nothing was compared"):
        run("test")
    assert run("generate") == 0
    assert run("test", rate="0.2") == 1
    assert "mismatches in" in caplog.text
    assert "different content" in caplog.text
    assert run("update", rate="0.2") == 0
    assert run("test", rate="0.2") == 0
