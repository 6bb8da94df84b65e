"""docs/run.md: its programs print what the page shows, but for numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[4] / "docs" / "run.md").read_text(encoding="utf-8")
CLOCK = 'import time\nprint("begin")\nimport torch\nprint("took", time.time())\n'


def shown(text: str) -> list[str]:
    """Return the words of an output; numbers and digests alike, wherever lines break."""
    return re.sub(r"[0-9a-f]{16}|\d+(\.\d+)?(e-\d+)?", "N", text).split()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("train.py", 1), ("clock.py", 0)])
def test_the_page_shows_what_is_printed(main, tmp_path: Path, name: str, code: int) -> None:
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    (tmp_path / "clock.py").write_text(CLOCK)
    said = main("run", name, cwd=tmp_path)
    assert said.returncode == code, said.stderr
    expected = re.search(rf"\$ hashbench run {name}\n(.*?)```", PAGE, re.DOTALL)
    assert expected is not None
    assert shown(said.stdout) == shown(expected[1])
