"""``--json``: every command's documents, against the schema that is shipped and the page that explains it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Main

from hashbench import cli
from hashbench.cli.parser import OneLineParser
from hashbench.core.finding import Finding, document
from tests import json_documents
from tests.json_documents import CALLS, COMMAND, OF_ALL, SCHEMA_FILE, calls, def_of, documents, problems

PAGE = SCHEMA_FILE.with_name("json.md")

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="hashbench is installed, its documentation is elsewhere")


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return found


def problems_of(found: dict[str, Any], shipped: dict[str, Any], like: dict[str, Any] | None = None) -> list[str]:
    """What a document lacks of the schema of its command, or of that of the document that it is ``like``."""
    whole = like or found
    name = "error" if "error" in whole else def_of(whole["command"])
    return problems(found, shipped["$defs"][name], shipped)


def commands_with_json(parser: OneLineParser) -> Iterator[str]:
    if parser.find("--json") is not None:
        yield parser.prog
    for sub in parser.commands.values():
        yield from commands_with_json(sub)


# ------------------------------------------------------------------------------------------------------- schema


@pytest.mark.slow
def test_the_shipped_schema_is_that_of_real_documents() -> None:
    found = json_documents.schema_text()
    assert SCHEMA_FILE.read_text(encoding="utf-8") == found, f"If that is meant: {COMMAND}, and docs/json.md"


@pytest.mark.slow
def test_every_document_is_as_the_schema_says() -> None:
    shipped = schema()
    for found in documents():
        assert problems_of(found, shipped) == [], found["command"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_goes_or_changes_is_told(name: str) -> None:
    """Every name of every object of a document, one at a time."""
    shipped, whole = schema(), calls()[name].document
    renamed = 0
    for path in paths_of(whole):
        changed = copy.deepcopy(whole)
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        holder[f"{path[-1]}_renamed"] = holder.pop(path[-1])
        assert problems_of(changed, shipped, like=whole), path
        renamed += 1
    assert renamed > 3


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each name of a document is, but those that are data themselves and those inside a program's arguments."""
    if isinstance(value, list):
        for number, item in enumerate(value[:2]):
            yield from paths_of(item, (*at, number))
    if isinstance(value, dict) and (
        not at or at[-1] not in {*json_documents._MAPS, *json_documents._ANYTHING, "facts"}
    ):
        for name, inner in value.items():
            if name not in json_documents._ANYTHING:
                yield (*at, name)
            if name not in {*json_documents._ANYTHING, "parts"}:  # parts may have names of their own
                yield from paths_of(inner, (*at, name))


def test_a_value_of_another_type_is_told() -> None:
    shipped = schema()
    good = {
        "schema": 1,
        "command": "hashbench audit",
        **document(Finding(headline="a", data={"results": "x", "counts": {}, "rows": []})),
    }
    assert problems_of(good, shipped) == []
    assert problems_of({**good, "counts": {"as documented": "4"}}, shipped)
    assert problems_of({**good, "headline": None}, shipped)
    assert problems_of({**good, "schema": 2}, shipped)


# ------------------------------------------------------------------------------------------------------ commands


@pytest.mark.slow
def test_every_command_with_the_flag_has_a_document_and_a_line_on_the_page() -> None:
    known = {command.removeprefix("hashbench ") for command in commands_with_json(cli._parser())}
    table = PAGE.read_text(encoding="utf-8").partition("## Names of each command")[2].partition("##")[0]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for line in lines for name in re.findall("`(.+?)`", line)} == known
    assert {found["command"] for found in documents()} == {f"hashbench {command}" for command in known}


@pytest.mark.slow
def test_every_name_on_the_page_is_in_a_document() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Names of each command")[2].partition("##")[0]
    made = [*documents()]
    for line in table.splitlines():
        if line.startswith("| `"):
            _, command_cell, names_cell, *_ = line.split("|")
            for command in re.findall("`(.+?)`", command_cell):
                of_command = [found for found in made if found["command"] == f"hashbench {command}"]
                seen = {name for found in of_command for name in found} - set(OF_ALL)
                missing = set(re.findall("`(.+?)`", names_cell)) - seen
                assert missing <= {"replicas"}, (command, missing)  # which only runs of one kind have


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_exit_code_and_verdict_say_the_same(name: str) -> None:
    call = calls()[name]
    found = call.document
    if "error" in found:
        assert call.code == 2
        assert "equal" not in found
        said = " ".join(call.errors.split())
        assert all(found["error"][part] in said for part in ("what", "consequence"))
        return
    assert not (found["equal"] and found["differs"])
    if call.line.split()[0] in ("sweep", "report", "audit"):
        assert call.code == 0
    else:
        assert call.code == (1 if found["differs"] else 0 if found["equal"] else 2)


@pytest.mark.slow
def test_the_verdicts_are_of_all_kinds() -> None:
    """Else what is tested above would not say much."""
    kinds = {(call.document.get("equal"), call.document.get("differs")) for call in calls().values()}
    assert kinds == {(True, False), (False, True), (False, False), (None, None)}


# ----------------------------------------------------------------------------------------------- standard output


def test_an_error_is_a_document_too(main: Main, tmp_path: Path) -> None:
    done = main("watch", "diff", "a", "b", "--json", cwd=tmp_path)
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert (found["schema"], found["command"]) == (1, "hashbench watch diff")
    assert found["error"].keys() == {"what", "consequence", "tip"}
    assert found["error"]["what"] in done.stderr
    assert main("watch", "diff", "a", "b", cwd=tmp_path).stdout == ""


def test_a_path_that_cannot_be_written_is_told_so_too(main: Main, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    done = main("sweep", "--inference", "--json", "--output", "a_file/x", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["command"] == "hashbench sweep"


def test_a_wrong_command_line_prints_nothing_on_standard_output(main: Main, tmp_path: Path) -> None:
    done = main("diff", "a", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.slow
def test_what_a_program_prints_is_not_in_the_document(main: Main, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(
        "import torch\nprint('loading')\n"
        "def before():\n    print('building')\n    return torch.nn.Linear(2, 2)\n"
        "def after(model):\n    return model\n"
        "def inputs():\n    return torch.ones(1, 2)\n",
        encoding="utf-8",
    )
    done = main("numeric", "file.py", "--inference", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["equal"] is True
    assert "loading" in done.stderr
    assert "building" in done.stderr


def test_repros_of_a_folder_are_listed_beside_the_document(main: Main, tmp_path: Path) -> None:
    (tmp_path / "night" / "repro" / "a").mkdir(parents=True)
    (tmp_path / "night" / "repro" / "a" / "call.json").write_text("{}")
    done = main("replay", "night", "--json", cwd=tmp_path)
    assert "error" in json.loads(done.stdout)
    assert "hashbench replay night/repro/a\n" in done.stderr


@pytest.mark.slow
def test_an_error_of_the_child_that_replays_is_one_document(main: Main, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "call.json").write_text("{}")
    done = main("replay", "a", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["command"] == "hashbench replay"


def test_a_check_that_compares_nothing_has_no_document(main: Main, tmp_path: Path) -> None:
    words = ("pipeline", "check", "--config", "a.py", "--output-dir", "out", "--once", "--json")
    done = main(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["what"] == "--once compares nothing"
    assert not (tmp_path / "out").exists()


def test_facts_of_the_same_label_are_all_there() -> None:
    found = document(Finding(headline="a", facts=(("first run", "1"), ("first run", "2"), ("cause", "x"))))
    assert found["facts"] == {"first run": "1", "first run 2": "2", "cause": "x"}
