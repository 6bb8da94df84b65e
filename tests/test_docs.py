"""What the documentation says can be typed in: every command parses, every zoo in it loads."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

from hashbench import cli
from hashbench.core.records import RunOptions
from hashbench.core.suites import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def _of_this_version(page: Path) -> str:
    """Drop sections whose diff adds what their commands need: ``extending_checks.py`` runs them."""
    return SECTION.sub(lambda part: "" if "\n```diff\n" in part[0] else part[0], page.read_text(encoding="utf-8"))


def _commands(program: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in BLOCK.finditer(_of_this_version(page)):
            lines = block["text"].splitlines() if block["language"] in ("", "sh", "bash", "console") else []
            commands = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines]
            found += [(page.name, command) for command in commands if command.split()[:1] == [program]]
    return found


def test_there_are_commands_to_check() -> None:
    assert len(_commands("hashbench")) >= 5
    assert len(_commands("make")) >= 3


@pytest.mark.parametrize(("page", "command"), _commands("hashbench"))
def test_every_hashbench_command_parses(page: str, command: str) -> None:
    parsed = cli._parser().parse_args(shlex.split(command)[1:])

    assert callable(parsed.command), page


@pytest.mark.parametrize(("page", "command"), _commands("make"))
def test_every_make_command_names_a_target(page: str, command: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [word for word in shlex.split(command)[1:] if "=" not in word and not word.startswith("-")]

    assert named, page
    assert set(named) <= targets, page


def test_the_index_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"^ *- \[(\w+)\]\(\1\.md\): \S", (docs / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted({page.stem for page in docs.glob("*.md")} - {"index"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_a_page_has_more_than_25_words(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*[*-] )", prose)
    texts = (re.sub("`[^`]*`", "X", text) for text in paragraphs if not text.lstrip().startswith(("|", "#", "<!--")))
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.!?:;])\s+", text)]
    assert [sentence for sentence in sentences if len(sentence.split()) > 25] == []


@pytest.mark.slow
def test_the_zoo_of_the_documentation_is_a_zoo(tmp_path: Path) -> None:
    from hashbench.core.suites import registry

    blocks = BLOCK.finditer((ROOT / "docs" / "zoo.md").read_text(encoding="utf-8"))
    code = next(block["text"] for block in blocks if block["language"] == "python")
    path = tmp_path / "zoo.py"
    path.write_text(code, encoding="utf-8")

    specs = registry.catalog(str(path))

    assert [spec.name for spec in specs] == ["classifier", "sorter", "wide_128", "wide_64", "with_everything"]
    for spec in specs:
        assert registry.load(spec, mode="training").module is not None


def test_the_readmes_tables_are_made_from_measured_files(tmp_path: Path) -> None:
    import json
    import runpy

    script = runpy.run_path(str(ROOT / "docs" / "readme_tables.py"))
    header = "dev,name,batch_size,accuracy,kernel,phase,cause,confidence,because\n"
    row = "eager_two_runs_differ,aten.index_put_.default,forward,write_race,proven,20 of 20 | differ\n"
    rows = f"cpu,slot_memory,,{row}cpu,slot_memory_twin,,pass,,,,,\ncpu,speaker_bank,,{row}"
    (tmp_path / "accuracy.csv").write_text(header + rows, encoding="utf-8")
    measured = {"machine": {"cores": "2"}, "tables": [{"title": "A", "headers": ["x", "goal"], "rows": [["1", "2"]]}]}
    ratios = {
        "title": "Goals of the native tracer",
        "headers": ["x", "native / no mode"],
        "rows": [["a", "1.4"], ["b", "0.98"]],
    }
    measured["tables"].append(ratios)
    (tmp_path / "benchmarks.json").write_text(json.dumps(measured), encoding="utf-8")

    table = script["specimens"]([tmp_path])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nafter\n", encoding="utf-8")
    script["_replace"](page, "benchmarks", script["benchmarks"](tmp_path / "benchmarks.json"))

    assert "0.98x to 1.4x" in script["cost"](tmp_path / "benchmarks.json")
    assert table.count("\n") == 2  # header, rule, the first row of the one cause
    assert "`aten.index_put_.default`" in table
    assert "20 of 20 \\| differ" in table
    assert "**A**" in page.read_text(encoding="utf-8")
    assert "old" not in page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="no place for specimens"):
        script["_replace"](page, "specimens", table)


def _printing_examples() -> list[tuple[str, str, str]]:
    """Page, code and printed output of each block of Python that prints: the output is the block of text right below,
    with at most a word between them; nothing where there is none."""
    examples = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = list(BLOCK.finditer(text))
        for block, after in itertools.zip_longest(blocks, blocks[1:]):
            if block["language"] == "python" and "print(" in block["text"]:
                near = after is not None and text[block.end() : after.start()].strip() in ("", "prints")
                shown = after["text"] if after is not None and near and after["language"] == "text" else ""
                examples.append((page.name, block["text"], shown))
    return examples


def test_there_are_examples_that_print() -> None:
    assert {page for page, *_ in _printing_examples()} >= {"trace.md", "bitwise.md"}


_RUN = """
import runpy, sys
import hashbench
for name in [name for name in vars(hashbench) if f"hashbench.{name}" in sys.modules]:
    delattr(hashbench, name)  # as in a new Python: an example imports what it uses
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(("page", "code", "printed"), _printing_examples())
def test_an_example_prints_what_its_page_says(
    page: str, code: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hashbench.core.diagnose.fresh_process import run_python

    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{page}.py"
    script.write_text(code, encoding="utf-8")

    done = run_python(_RUN, str(script), seconds=300)

    assert done.stdout == printed, done.stderr


def test_the_benchmark_of_rows_finds_the_functions_that_it_counts() -> None:
    """It names them by text, in order to patch them; it takes an hour, so that nobody runs it after a change."""
    rows = pytest.importorskip("benchmarks.rows")
    assert len(rows._counted(rows.Stages())) > len(rows.TRACED)


REFUSED = """
import torch

class Puts(torch.nn.Module):
    def forward(self, x):
        return x.put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

MODELS = {"puts": lambda: (Puts(), (torch.zeros(4),))}
"""


@pytest.mark.slow
def test_untraced_rows_are_made_again_with_warnings_where_torch_refuses_an_op(tmp_path: Path) -> None:
    rows = pytest.importorskip("benchmarks.rows")
    (tmp_path / "zoo.py").write_text(REFUSED, encoding="utf-8")
    (spec,) = registry.catalog(str(tmp_path / "zoo.py"))
    try:
        row = rows.untraced_row(spec, RunOptions(mode="inference", output=str(tmp_path)))
    finally:
        mock.patch.stopall()  # the worker of a row ends with it
    assert row.accuracy == "pass"
