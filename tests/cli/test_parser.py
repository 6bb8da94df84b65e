"""Parsers: help that is sentences, flags that are not abbreviated, and which flags require or exclude each other."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import CHECKOUT, Main

from hashbench import cli
from hashbench.cli.completion import every
from hashbench.cli.parser import RULES, Commands, Excludes, OneLineParser, Requires, default_words, did_you_mean

PARSERS = {parser.prog: parser for parser in every(cli._parser())}
VERBS = """
Add Allow Audit Call Capture Cast Check Choose Compare Compile Complete Connect Describe Exclude Exit Find Hash Import
Keep Limit Link List Measure Merge Name Override Pass Print Read Record Replay Report Request Rerun Retry Run Schedule
Seed Select Set Show Spend Split Stop Sweep Take Trace Train Update Use Verify Wait Write
"""


# -------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_help_is_a_sentence_that_names_the_metavar(parser: OneLineParser) -> None:
    for action in parser.flags:
        text = (action.help or "").replace("%%", "%")
        assert text.split()[0] in VERBS.split(), (action.dest, text)
        assert re.search(r"[.…]`?$", text), (action.dest, text)
        assert action.choices or not isinstance(action.metavar, str) or names(action.metavar) <= names(text), text
    for text in (parser.description, *parser.summaries.values()):
        assert text
        assert (text.split()[0] in VERBS.split(), text[-1]) == (True, "."), text


def names(text: str) -> set[str]:
    """The placeholders in ``text``: its words in capitals, and names of files to give."""
    return set(re.findall(r"\b(?:[A-Z]{2,}|[A-Z]+[0-9]?)\b(?:\.(?:py|log))?", text)) - {"GC", "JSON", "CSV"}


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_help_shows_every_flag_and_its_default(parser: OneLineParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    shown = [re.sub(r"\s+", " ", line) for line in parser.format_help().splitlines()]
    for action in parser.flags:
        assert action.help, action.dest
        (line,) = (line for line in shown if action.help.replace("%%", "%") in line)
        default = default_words(action.default)
        assert default in line, action.dest
        assert not default or "default: " in line, action.dest
    assert set(parser.names) <= set(re.findall(r"--?[a-z][\w-]*", " ".join(shown)))


def test_hashbench_lists_every_command_once_by_group(main: Main, tmp_path: Path) -> None:
    shown = main("--help", cwd=tmp_path).stdout
    assert sorted(name for names in cli.SECTIONS.values() for name in names) == sorted(PARSERS["hashbench"].commands)
    for title, commands in cli.SECTIONS.items():
        block = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in block.splitlines()] == list(commands)
    example = re.search(r"^Example:\n  hashbench (.*)$", shown, re.MULTILINE)
    assert example
    assert callable(cli._parser().parse_args(example[1].split()).command)
    assert "`hashbench docs`" in shown


# ------------------------------------------------------------------------------------------------------- rules


class Asked:
    """A command with two flags, one of which has a value, and the rules that are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rules: Requires | Excludes) -> None:
        monkeypatch.setattr("hashbench.cli.parser.RULES", rules)
        self.parser = OneLineParser(prog="tool")
        self.parser.group("group").add_argument("--fast", action="store_true", help="Run fast.")
        self.parser.add_argument("--level", default="low", metavar="L", help="Set the level to L.")
        self.parser.add_argument("-n", "--number", type=int, metavar="N", help="Set the number to N.")

    def error(self, words: str, capsys: pytest.CaptureFixture[str]) -> str:
        """What the command says of these words; empty where it takes them."""
        with contextlib.suppress(SystemExit):
            self.parser.parse_args(words.split())
        return capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "words", "said"),
    [
        (Requires("--fast", "--level"), "--fast", "--fast requires --level"),
        (Requires("--fast", "--level"), "--fast --level high", ""),
        (Requires("--fast", "--level"), "--level high", ""),
        (Requires("--fast", "--level high"), "--fast --level middle", "--fast requires --level high"),
        (Requires("--fast", "--level high"), "--fast --level high", ""),
        (Requires("--number", "--fast"), "-n 0", "--number requires --fast"),
        (Excludes("--fast", "--level"), "--fast --level high", "--fast cannot be combined with --level"),
        (Excludes("--fast", "--level high"), "--fast --level middle", ""),
        (Excludes("--fast", "--level"), "--fast", ""),
        (Requires("--fast", "--elsewhere"), "--fast", ""),
        (Excludes("--elsewhere", "--fast"), "--fast", ""),
    ],
    ids=str,
)
def test_rule(
    rule: Requires | Excludes,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = f"tool: {said}. See `tool --help`.\n" if said else ""
    assert Asked(monkeypatch, rule).error(words, capsys) == expected


VALUES = {
    "--output": "out",
    "--address": "auto",
    "--ray-resource": "a",
    "--results": "out",
    "--compilations": "2",
    "--weights": "a b",
    "--deterministic": "off",
    "--tracer": "python",
    "--dumps": "a b",
    "--kernel": "a.py:f",
    "--reference": "a.py:g",
    "--inputs": "a.py:inputs",
    "--dtypes": "float32",
    "--seconds": "2",
}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_is_of_flags_that_a_command_has(rule: Requires | Excludes, main: Main, tmp_path: Path) -> None:
    flags = [one.partition(" ")[0] for one in (rule.flag, rule.other)]
    (command,) = {name for name, parser in PARSERS.items() if all(map(parser.find, flags))} - {"hashbench"} & {
        "hashbench sweep",
        "hashbench audit",
        "hashbench numeric",
    } - ({"hashbench audit"} if "--resume" in flags else set())
    words = [*command.split()[1:], *(["--inference"] if "sweep" in command else [])]
    other_inputs = {"--weights", "--dumps"} & {*flags} or rule.flag == "--kernel"
    words += ["two.py"] if "numeric" in command and not other_inputs else []
    for one in [rule.flag] if isinstance(rule, Requires) else [rule.flag, rule.other]:
        flag, _, value = one.partition(" ")
        action = PARSERS[command].find(flag)
        assert action is not None
        words += [flag] if action.nargs == 0 else [flag, *(value or VALUES.get(flag, "1")).split()]
    done = main(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"{command}: {rule}. See `{command} --help`.\n")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ misspelt names


def test_unknown_command_lists_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="tool")
    Commands(parser, "COMMAND").add_parser("run", help="Run it.")
    with pytest.raises(SystemExit):
        parser.parse_args(["zzz"])
    assert capsys.readouterr().err == "tool: unknown command 'zzz' (choose from run). See `tool --help`.\n"


ABBREVIATED = {
    ("sweep", "--trainin"): "--training",
    ("sweep", "--diag", "3"): "--diagnose-budget",
    ("dynamo", "--stres", "huggingface.py"): "--stress",
    ("dynamo", "--trace", "always", "--stres", "huggingface.py"): "--stress",
    ("nightly", "--suit", "zoo.py"): "--suite",
    ("fingerprint", "record", "--suit", "zoo.py"): "--suite",
}


@pytest.mark.parametrize(("words", "meant"), ABBREVIATED.items(), ids=map(" ".join, ABBREVIATED))
def test_flags_are_not_abbreviated(main: Main, tmp_path: Path, words: tuple[str, ...], meant: str) -> None:
    done = main(*words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert re.search(rf": unknown flag --\w+\. Did you mean {meant}\? See `hashbench .*--help`\.$", line)


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("--frobnicate", ["--strict", "--force"], ""),
        ("--trainng", ["--training", "--runs"], ". Did you mean --training?"),
        ("--s", ["--stress", "--suite"], ". Did you mean --stress?"),
        ("zo", ["zoo", "index"], ". Did you mean zoo?"),
        ("-", ["--runs"], ""),
        ("xyz", ["zoo", "index"], ""),
    ],
)
def test_only_a_near_name_is_suggested(word: str, known: list[str], said: str) -> None:
    assert did_you_mean(word, known) == said


def test_flags_after_the_script_are_passed_through() -> None:
    parsed = cli._parser().parse_args(["dynamo", "--stress", "huggingface.py", "--accur", "--trainin", "--stres"])
    assert (parsed.stress, parsed.arguments) == (True, ["--accur", "--trainin", "--stres"])


def test_no_parser_takes_abbreviated_flags() -> None:
    """But the stand-in for PyTorch's harness, which does."""
    stand_in = CHECKOUT / "tests" / "integrations" / "dynamo" / "standin"
    files = [path for folder in ("hashbench", "benchmarks", "tests") for path in (CHECKOUT / folder).rglob("*.py")]
    made = {
        f"{path.relative_to(CHECKOUT)}:{call.lineno}": {word.arg: word.value for word in call.keywords}
        for path in files
        if stand_in not in path.parents and "ArgumentParser(" in (text := path.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "ArgumentParser"
    }
    assert len(made) > 10
    assert [
        where for where, words in made.items() if ast.unparse(words.get("allow_abbrev", ast.Constant(1))) != "False"
    ] == []


@pytest.mark.slow
def test_options_of_pytest_are_not_abbreviated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--hashbench-outp=x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "unrecognized arguments: --hashbench-outp=x" in done.stderr) == (4, True)
