"""The pytest plug-in, as pytest loads it: ``pytest_project.py`` holds a test for each thing that can happen, and the
project of the documentation runs beside it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hashbench.integrations.pytest import plugin, running

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
PROJECT = Path(__file__).with_name("pytest_project.py")
EXAMPLE = ROOT / "docs" / "examples" / "pytest_project"
QUICKLY = ("-o", "hashbench_replays=3", "-o", "hashbench_diagnose_budget=60")
ENTRY_POINT = "hashbench"


def plugin_arguments() -> list[str]:
    """Loads the plug-in also where hashbench was installed before it had one."""
    registered = importlib.metadata.entry_points(group="pytest11", name=ENTRY_POINT)
    return [] if registered else ["-p", "hashbench.integrations.pytest.plugin"]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin_arguments(), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What became of each test of the project: ``passed``, ``failed``, ``error`` or ``skipped``, and its message."""
    folder = tmp_path_factory.mktemp("project") / "example"
    shutil.copytree(EXAMPLE, folder)
    shutil.copy(PROJECT, folder / "test_project.py")
    options = ("--junitxml=report.xml", "--hashbench-output=kept", "--strict-markers", "-q", "--tb=short")
    done = run_pytest(folder, *options, *QUICKLY)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        outcome: str = "passed"
        message: str | None = ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = {"failure": "failed"}.get(part.tag, part.tag)
                message = part.text if part.tag != "skipped" else part.get("message", "")
        found[case.attrib["name"]] = (outcome, message or "")
    found["<folder>"] = ("", str(folder / "kept"))
    return found


PASSES = [
    "test_random_numbers_begin_anew",
    "test_first_value_is_returned",
    "test_arguments_are_copied_together",
    "test_marked_training",
    "test_marked_training_ran_four_times",
    "test_marked_method[1]",
    "test_marked_method[3]",
    "test_unmarked",
    "test_all_is_put_back",
    "test_settings_are_those_of_the_test",
    "test_empty_is_allowed",
    "test_the_op_gives_the_same_in_every_run",
    "test_so_does_its_gradient",
    "test_training_gives_the_same_model[True]",
    "test_training_gives_the_same_model[False]",
    "test_with_the_settings_of_a_reproducible_training",
    "test_stressed_and_clean",
]


@pytest.mark.parametrize("name", PASSES)
def test_what_is_equal_in_every_run_passes(project: dict[str, tuple[str, str]], name: str) -> None:
    assert project[name] == ("passed", "")


REFUSED = {
    "test_sequence": r"differ in their structure.* sequence, reached aten\.add\.Tensor \(forward, op 2 of 2",
    "test_other_structure": r"runs differ in their structure: only the first run has output\.part",
    "test_python_value": r"runs differ in output;",
    "test_strange_object": r"cannot compare runs: output\.1: type builtins\.object",
    "test_lock": r"cannot copy argument 0, a _thread\.lock .* Make it inside the function\.",
    "test_empty": r"nothing to compare: .* say allow_empty=True\.",
    "test_fails_in_the_second_run": r"assert 2 < 2 .*raised in run 2 of 3, the runs before it did not raise",
    "test_ambiguous": r"seed= could be meant for the function too",
    "test_result_of_a_call": r"needs a function to run, not a Tensor",
    "test_unknown_option": r"run_to_run has no option repeat; it has runs, seed",
    "test_positional_option": r"takes its options by name: run_to_run\(runs=5\)",
    "test_one_run": r"runs must be an int >= 2, got 1",
    "test_coroutine": r"cannot run a coroutine",
    "test_stressed": r"differ in 100 % of pairs under collector .* aten\.mul\.Tensor",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_pass_fails_in_clear_words(project: dict[str, tuple[str, str]], name: str) -> None:
    outcome, message = project[name]

    assert outcome == "failed"
    assert re.search(REFUSED[name], flat(message)), message


def test_a_marker_that_would_be_ignored_is_an_error(project: dict[str, tuple[str, str]]) -> None:
    assert project["test_method"][0] == "error"
    assert "cannot run a method of unittest.TestCase" in project["test_method"][1]


def test_skips_and_expected_failures_stay_what_they_are(project: dict[str, tuple[str, str]]) -> None:
    assert project["test_skips"][0] == "skipped"
    assert project["test_expected_failure"][0] == "skipped"
    assert "known" in project["test_expected_failure"][1]
    assert project["test_known_difference"][0] == "skipped"
    assert "nobody resets" in project["test_known_difference"][1]


def flat(message: str) -> str:
    """A message on one line, without what pytest puts before its lines."""
    words = " ".join(re.sub(r"^E  ", "", line) for line in message.splitlines()).split()
    return " ".join(words).removeprefix("Failed: ")


def test_a_kernel_is_diagnosed(project: dict[str, tuple[str, str]]) -> None:
    outcome, message = project["test_kernel"]
    expected = (
        r"Noisy: runs differ in output \(6 elements, by at most .*\d+ of \d+ replays differed",
        r"hashbench_pytest_project\.noisy\.default \(forward, op \d of \d, in Noisy, at test_proj\S*:\d+",
        r"cause: outside_value, (proven|likely): .*constant entropy",
        r"evidence: .*call/entropy 0/",
        r"to do: Pass the value in.* repro: in a fresh process \d+ of \d+ calls differ",
    )
    assert outcome == "failed"
    assert re.search(".*".join(expected), flat(message)), message
    assert "assert_runs_equal(Noisy(), torch.ones(2, 3))" in message  # the line of the test


def test_the_commands_name_the_repro_and_the_traces(project: dict[str, tuple[str, str]]) -> None:
    found = flat(project["test_kernel"][1]).partition("Next: hashbench replay --import test_project.py ")[2].split()
    repro, traces = Path(found[0]), [Path(name) for name in found[3:5]]

    assert str(repro).startswith(project["<folder>"][1])
    assert (repro / "repro.py").is_file()
    assert found[1:3] == ["hashbench", "diff"]
    assert all(path.is_file() for path in traces)


def test_a_marked_test_shows_the_report_alone(project: dict[str, tuple[str, str]]) -> None:
    outcome, message = project["test_generator"]

    assert outcome == "failed"
    assert message.startswith(
        "test_project.py::test_generator: runs differ in what forward//aten.rand.generator#0 left"
    )
    assert "cause: rng, proven: " in flat(message)
    assert "to do: Reset test_project.OWN_GENERATOR" in flat(message)


def test_documented_failure_is_that_of_the_example(project: dict[str, tuple[str, str]]) -> None:
    page = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    given = flat(project["test_documented_failure"][1])
    assert _without_numbers(given[given.index("with_noise: ") :]).startswith(_without_numbers(flat(shown)))


def _without_numbers(text: str) -> str:
    """A text without what differs from one machine or run to the next: counts, states and places of files."""
    text = re.sub(r"generator state [0-9a-f]{16}", "generator state", text)
    return re.sub(r"\d[\d.]*", "", re.sub(r"\S*kept/\S*/", "kept/", text))


# ------------------------------------------------------------------------------------- what does not need torch


def test_a_session_that_does_not_use_it_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('hashbench') or pytestconfig.pluginmanager.has_plugin(\n"
        "        'hashbench.integrations.pytest.plugin')\n"
        "    ours = {name for name in sys.modules if name.startswith('hashbench.')}\n"
        "    names = ('', '.asserts', '.kernel', '.model', '.options', '.weights')\n"
        "    ours -= {f'hashbench.testing{name}' for name in names}\n"
        "    packages = {'hashbench.integrations', 'hashbench.integrations.pytest'}\n"
        "    assert ours == {*packages, *(f'hashbench.integrations.pytest.{name}' for name in ('plugin', 'running'))}\n"
        "    assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)\n",
        encoding="utf-8",
    )
    done = run_pytest(tmp_path, "-q")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hashbench_runs = many", "hashbench_runs must be a number, got many"),
        ("hashbench_runs = 1", "hashbench_runs must be >= 2, got 1"),
        ("hashbench_replays = 2.5", "hashbench_replays must be a number, got 2.5"),
        ("hashbench_diagnose_budget = nan", "hashbench_diagnose_budget must be >= 0, got nan"),
        ("hashbench_diagnose_budget = -1", "must be >= 0, got -1"),
        ("hashbench_tracer = fast", "hashbench_tracer must be auto, native, python, got fast"),
    ],
)
def test_nonsense_in_the_ini_file_ends_the_session(pytester: pytest.Pytester, line: str, words: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    pytester.makepyfile("def test_nothing(): pass")

    result = pytester.runpytest_inprocess(*plugin_arguments())

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*ERROR: *{words}*"])


@pytest.mark.parametrize("output", ["taken", "taken/below"])
def test_an_output_that_is_a_file_or_below_one_ends_the_session(pytester: pytest.Pytester, output: str) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    pytester.path.joinpath("taken").write_text("")

    result = pytester.runpytest_inprocess(*plugin_arguments(), f"--hashbench-output={output}")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--hashbench-output: *taken is not a folder*"])


def test_marker_and_options_are_documented_by_pytest_itself(pytester: pytest.Pytester) -> None:
    assert (
        "@pytest.mark.run_to_run(runs=None"
        in pytester.runpytest_inprocess(*plugin_arguments(), "--markers").stdout.str()
    )
    text = pytester.runpytest_inprocess(*plugin_arguments(), "--help").stdout.str()
    assert {"--hashbench-output=DIR", "hashbench_runs", "hashbench_replays"} <= set(re.split(r"[\s]+", text))


CALLS = """
import time
import pytest
from hashbench.core.check import function

function.QUICK_SECONDS = 2.0  # a first run on a busy machine may take more than 50 ms

def counting(seconds):
    calls = []
    def function():
        calls.append(1)
        time.sleep(seconds)
        return 1
    return function, calls

@pytest.mark.parametrize(("seconds", "asked", "expected"), %s)
def test_it(assert_runs_equal, seconds, asked, expected):
    function, calls = counting(seconds)
    assert_runs_equal(function, **asked)
    assert len(calls) == expected
"""


def summary(pytester: pytest.Pytester, cases: str, *arguments: str) -> str:
    pytester.makepyfile(CALLS % cases)
    done = pytester.runpytest_subprocess(*plugin_arguments(), *arguments)
    assert done.ret == 0, done.stdout.str()
    return next((line for line in done.outlines if line.startswith("hashbench:")), "")


def test_summary_states_the_bound_of_equal_runs(pytester: pytest.Pytester) -> None:
    """A quick function runs five times, a slow one twice, and any as often as is asked."""
    said = summary(pytester, "[(0, {}, 5), (2.1, {}, 2), (0, {'runs': 3}, 3)]")
    assert said == (
        "hashbench: 3 checks with 2 to 5 equal runs: up to 95 % of further runs may still differ (95 % confidence); "
        "hashbench_runs = 21 lowers this bound to 14 %"
    )


def test_summary_names_what_draws_in_eval(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from torch.nn.functional import dropout

        class Drops(torch.nn.Module):
            def forward(self, x):
                return dropout(x, 0.5, training=True)

        @pytest.mark.parametrize("model", [Drops().eval(), Drops(), torch.nn.Dropout().eval()], ids=["a", "b", "c"])
        def test(assert_runs_equal, model):
            assert_runs_equal(model, torch.ones(8), runs=2)
        """
    )
    done = pytester.runpytest_subprocess(*plugin_arguments())
    assert done.ret == 0, done.stdout.str()
    told = [line for line in done.outlines if "in eval()" in line]
    assert len(told) == 1
    assert "::test[a] draws random numbers in eval(); its runs are equal because each starts from the same" in told[0]


@pytest.mark.exhaustive
def test_set_runs_are_made_also_of_quick_functions(pytester: pytest.Pytester) -> None:
    assert "1 check with 2 equal runs: up to 95 %" in summary(pytester, "[(0, {}, 2)]", "-o", "hashbench_runs=2")
    many = summary(pytester, "[(0, {}, 30)]", "-o", "hashbench_runs=30")
    assert many.endswith("1 check with 30 equal runs: up to 10 % of further runs may still differ (95 % confidence)")


@pytest.mark.exhaustive
def test_summary_counts_the_checks_of_all_workers(pytester: pytest.Pytester) -> None:
    assert "2 checks with 2 to 3 equal" in summary(pytester, "[(0, {'runs': 3}, 3), (0, {'runs': 2}, 2)]", "-n2")


def test_another_plugin_that_takes_the_test_over_is_noticed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
    )
    pytester.makepyfile("import pytest\n@pytest.mark.run_to_run\ndef test_it(): pass\n")

    result = pytester.runpytest_inprocess(*plugin_arguments())

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*another plug-in ran the test in its own way, once.*"])


def test_every_test_and_every_worker_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    names = [running.folder_name(test) for test in ("a/test_x.py::test_y[1/2]", "b/test_x.py::test_y[1/2]")]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    names.append(running.folder_name("a/test_x.py::test_y[1/2]"))

    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def test_the_package_registers_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = project["entry-points"]["pytest11"][ENTRY_POINT]

    assert importlib.import_module(module) is plugin


@pytest.mark.parametrize(("tracer", "loaded"), [("auto", "1"), ("python", "0")])
def test_native_tracer_is_built_before_the_first_test(tracer: str, loaded: str, tmp_path: Path) -> None:
    """One that has to be compiled takes none of the time that a test may have."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_runtest_setup(item):\n"
        "    from hashbench.core.trace import native\n"
        "    print('loaded:', native.load.cache_info().currsize)\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(assert_runs_equal):\n    assert_runs_equal(int)\n")
    done = run_pytest(tmp_path, "-s", "-o", f"hashbench_tracer={tracer}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"loaded: (.)", done.stdout) == [loaded]
