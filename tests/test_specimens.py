"""The planted faults, through the command line: every row must say what the specimen's own truth says.

The truth is in ``models/specimens.csv``, in the columns that begin with ``truth_``; an empty cell leaves that open.
Where the tracers see different things, a cell says ``native|python``. A specimen with a truth about ``untraced`` is
swept with ``--untraced-pair``: only so can it show what it is. Truths of batch invariance that torch alone decides
(``by torch alone``, with the kernels that may be named) are asked of it in
``tests/extensions/invariance/test_natural.py``.
"""

from __future__ import annotations

import ast
import csv
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from running_order import LONGEST_FIRST

import hashbench
from hashbench import cli
from hashbench.core.catalog import CAUSES, Confidence, Origin
from hashbench.core.records import MODES, Row
from hashbench.core.results.rows import ROWS, read_rows
from hashbench.core.suites.csv_file import data_folder
from hashbench.core.trace.tracer import choose
from tests.flat_rows import flat

pytestmark = pytest.mark.usefixtures("shared_servers")

PACKAGE = Path(hashbench.__file__).parent
TRUTH, TRUTH_OF_BATCHES, TRUTH_OF_INVARIANCE = "truth_", "truth_batch_", "truth_invariance"


def specimens() -> dict[str, dict[str, str]]:
    with (data_folder() / "specimens.csv").open(newline="", encoding="utf-8") as file:
        return {line["name"]: line for line in csv.DictReader(file)}


SPECIMENS = specimens()


def truth(name: str, tracer: str) -> dict[str, str]:
    """What a row of this specimen must say where ``tracer`` made it, by column; an empty text leaves that open."""
    cells = {column.removeprefix(TRUTH): text for column, text in SPECIMENS[name].items() if is_truth(column)}
    return {column: text.split("|")[-1 if tracer == "python" else 0] for column, text in cells.items()}


def is_truth(column: str) -> bool:
    """Whether a column says what a row of two equal runs is, not one of smaller batches or of another invariance."""
    return column.startswith(TRUTH) and not column.startswith((TRUTH_OF_BATCHES, TRUTH_OF_INVARIANCE))


AUTO = choose("auto").tracer
"""What ``--tracer auto`` is on this machine."""
TRUTHS = {name: truth(name, AUTO) for name in SPECIMENS}
BATCHED = [name for name, line in SPECIMENS.items() if line[f"{TRUTH_OF_BATCHES}accuracy"]]
"""Those of batch invariance, of which two equal runs agree."""
BY_TORCH = "by torch alone"
PLANTED = [name for name in BATCHED if SPECIMENS[name.removesuffix("_twin")][f"{TRUTH_OF_BATCHES}accuracy"] != BY_TORCH]
"""Those of them whose truth is the same on every machine, with their twins."""
WITH_TOKENS = [name for name, line in SPECIMENS.items() if line[TRUTH_OF_INVARIANCE]]
"""Those of tokens beside padding and after a cache, of which two equal runs agree, too; ``test_variants.py``
runs them."""
HERE = {
    name: line for name, line in SPECIMENS.items() if not (line["devices"] or name in BATCHED or name in WITH_TOKENS)
}
"""Those of every device. Those of an accelerator have tests of their own in ``test_accelerator_specimens.py``."""
RUNNABLE = [(name, mode) for name, line in HERE.items() for mode in MODES if not line[f"skip_{mode}"]]
SKIPPED = [(name, mode) for name, line in HERE.items() for mode in MODES if line[f"skip_{mode}"]]
BLAMED = {"eager_two_runs_differ", "replicas_differ", "results_not_comparable"}
"""Statuses of specimens whose difference has a place and a cause."""
DIFFERING = [name for name, said in TRUTHS.items() if said["accuracy"] in BLAMED]
STRESSED = [name for name in SPECIMENS if SPECIMENS[name.removesuffix("_twin")][f"{TRUTH}latent"]]
"""Those that pass and differ under stress, and their twins, which do not; with two threads, so that races are rare."""
MODE_OF = {name: "inference" if line["skip_training"] else "training" for name, line in SPECIMENS.items()}
"""The mode in which a specimen is diagnosed."""
BY_PYTHON = [
    (name, MODE_OF[name])
    for name in (HERE if AUTO == "native" else ())
    if any("|" in text for text in SPECIMENS[name.removesuffix("_twin")].values())
]
"""In which the tracers see different things, and their twins: they are swept with the Python tracer, too."""
WITHOUT_SPECIMEN = {"unreproduced"}
"""Causes that nothing can be made to show honestly: what differs once and never again cannot be planted."""


SHARES = {"training": 4, "inference": 2}
"""Sweeps into which the diagnosed specimens of a mode are divided."""
STRESSED_SHARES = 2
"""The same for those that are stressed."""
UNDIAGNOSED = ("--diagnose-budget", "0")
"""Flags of a specimen in the mode in which it is not diagnosed."""
NUMBER = {name: number // 2 for number, name in enumerate(HERE)}
"""The same for a specimen and its twin."""


def grouped(pairs: Iterable[tuple[str, str]]) -> list[ParameterSet]:
    return [pytest.param(*pair, id=" in ".join(pair), marks=marks_of(*pair)) for pair in dict.fromkeys(pairs)]


def marks_of(name: str, mode: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a specimen in a mode. ``make test`` runs each in the mode in which it is diagnosed, and one
    share of those that are stressed; the rest is exhaustive."""
    flags, group = flags_of(name, mode), group_of(name, mode)
    sampled = flags != UNDIAGNOSED and not (name in STRESSED and group.endswith(" 1"))
    marks = [pytest.mark.slow, pytest.mark.xdist_group(group)]
    return marks if sampled else [*marks, pytest.mark.exhaustive]


def flags_of(name: str, mode: str) -> tuple[str, ...]:
    """Each specimen is diagnosed in one mode, ``MODE_OF``: it takes seconds."""
    if name in STRESSED:
        return ("--stress", "--threads", "2", "--diagnose-budget", "30")
    undiagnosed = mode != MODE_OF[name] and not SPECIMENS[name][f"skip_{mode}"]
    untraced = bool(TRUTHS[name]["untraced"])
    return (*(UNDIAGNOSED if undiagnosed else ()), *(("--untraced-pair",) if untraced else ()))


def group_of(name: str, mode: str) -> str:
    """The sweep that a row comes from, which is an ``xdist_group`` of its own: workers share them."""
    flags = flags_of(name, mode)
    shares = STRESSED_SHARES if name in STRESSED else 1 if flags else SHARES[mode]
    share = f"{NUMBER[name] % shares}" if shares > 1 else ""
    return " ".join(["specimens", mode, *flags, share]).strip()


@pytest.fixture(scope="session")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Row]:
    """The row of a specimen in a mode, for which its whole group is swept."""

    @functools.cache
    def rows(group: str) -> Mapping[tuple[str, str], Row]:
        _, mode, *_ = group.split()
        folder = tmp_path_factory.mktemp("specimens")
        names = [name for name in HERE if group_of(name, mode) == group]
        sweep(folder, *flags_of(names[0], mode), "--only", *names, mode=mode)
        return {(row.name, row.mode): row for row in read_rows(folder / "accuracy.csv")}

    return lambda name, mode: rows(group_of(name, mode))[name, mode]


def sweep(folder: Path, *flags: str, mode: str) -> None:
    command = ["sweep", "--suite", "specimens", f"--{mode}", "--output", str(folder)]
    # The races need other threads, whatever number of cores this machine has; eight meet also where two hardly ever do.
    assert cli.main([*command, "--threads", "8", "--replays", "8", *flags]) == 0


def untrue(row: Row) -> dict[str, tuple[str, object]]:
    """Columns of ``row`` that are not as its specimen's truth says, each with what was expected and what was found."""
    said = {column: text for column, text in truth(row.name, row.tracer).items() if text}
    if MODE_OF[row.name] != row.mode:
        said = {column: text for column, text in said.items() if column not in ("cause", "confidence")}
    return {
        column: (text, getattr(flat(row), column))
        for column, text in said.items()
        if not agrees(getattr(flat(row), column), text)
    }


def agrees(found: object, text: str) -> bool:
    if text == ">0":
        return isinstance(found, int) and found > 0
    return str(found) == text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), grouped(RUNNABLE))
def test_row_says_the_truth(name: str, mode: str, row_of: Callable[[str, str], Row]) -> None:
    row = row_of(name, mode)
    assert untrue(row) == {}, f"{row.detail} {row.evidence.text} {row.error}".strip()


@pytest.fixture(scope="session")
def row_by_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Row]:
    """The row of one of ``BY_PYTHON``, for which all of its mode are swept."""

    @functools.cache
    def rows(mode: str) -> Mapping[str, Row]:
        folder = tmp_path_factory.mktemp("by_python")
        names = [name for name, its in BY_PYTHON if its == mode]
        sweep(folder, "--tracer", "python", "--untraced-pair", "--only", *names, mode=mode)
        return {row.name: row for row in read_rows(folder / "accuracy.csv")}

    return lambda name, mode: rows(mode)[name]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.xdist_group("specimens --tracer python")  # one worker, whose fork server is replaced for them
@pytest.mark.parametrize(("name", "mode"), BY_PYTHON)
def test_row_of_the_python_tracer_says_its_truth(
    name: str, mode: str, row_by_python: Callable[[str, str], Row]
) -> None:
    row = row_by_python(name, mode)
    assert row.tracer == "python"
    assert untrue(row) == {}, f"{row.detail} {row.evidence.text} {row.error}".strip()


@pytest.mark.parametrize(("name", "mode"), grouped((name, MODE_OF[name]) for name in STRESSED))
def test_what_is_rare_is_found_under_stress_and_its_twin_is_clean(
    name: str, mode: str, row_of: Callable[[str, str], Row]
) -> None:
    row = row_of(name, mode)
    assert (flat(row).stressed != "", flat(row).latent) == (True, SPECIMENS[name][f"{TRUTH}latent"]), flat(row).stressed
    if SPECIMENS[name][f"{TRUTH}latent_cause"] == "garbage_collection":
        assert (flat(row).latent_cause, flat(row).latent_confidence) == ("garbage_collection", "proven"), row.because


@pytest.fixture(scope="session")
def row_of_batches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Row]:
    """The row of one of ``PLANTED``, for which all are swept."""

    @functools.cache
    def rows() -> Mapping[str, Row]:
        folder = tmp_path_factory.mktemp("batches")
        sweep(folder, "--batch-invariant", "--diagnose-budget", "20", "--only", *PLANTED, mode="inference")
        return {row.name: row for row in read_rows(folder / "accuracy.csv")}

    return lambda name: rows()[name]


@pytest.mark.slow
@pytest.mark.xdist_group("specimens batches")
@pytest.mark.parametrize("name", PLANTED)
def test_row_of_smaller_batches_says_the_truth(name: str, row_of_batches: Callable[[str], Row]) -> None:
    row, line = row_of_batches(name), SPECIMENS[name]
    said = {
        c.removeprefix(TRUTH_OF_BATCHES): text for c, text in line.items() if c.startswith(TRUTH_OF_BATCHES) and text
    }
    assert {column: getattr(flat(row), column) for column in said} == said, (
        f"{row.detail} {row.evidence.text} {row.error}"
    )


@pytest.mark.parametrize(("name", "mode"), grouped((name, "inference") for name in HERE if SPECIMENS[name]["runs"]))
def test_a_specimen_may_ask_for_more_runs(name: str, mode: str, row_of: Callable[[str, str], Row]) -> None:
    assert row_of(name, mode).runs == int(SPECIMENS[name]["runs"])


@pytest.mark.parametrize(("name", "mode"), grouped(SKIPPED))
def test_skipped_mode_gives_its_reason(name: str, mode: str, row_of: Callable[[str, str], Row]) -> None:
    row = row_of(name, mode)
    assert row.accuracy == "pass_due_to_skip"
    assert SPECIMENS[name][f"skip_{mode}"] in row.error


@pytest.mark.parametrize(("name", "mode"), grouped([("voxel_grid", "inference")]))
def test_operator_without_deterministic_kernel_is_named_and_run_with_warnings(
    name: str, mode: str, row_of: Callable[[str, str], Row]
) -> None:
    row = row_of(name, mode)
    assert (row.deterministic, row.nondeterministic_op) == ("warn", "aten.put_.default")


def test_all_sweeps_are_among_what_is_begun_first() -> None:
    groups = {group_of(*pair) for pair in (*RUNNABLE, *SKIPPED)}
    assert {group for group in LONGEST_FIRST if group.startswith("specimens ")} >= groups


@pytest.mark.parametrize("origin", Origin)
def test_every_origin_has_a_specimen(origin: str) -> None:
    assert any(said["origin"] == origin for said in TRUTHS.values())


@pytest.mark.parametrize(
    "cause", [name for name, cause in CAUSES.items() if not cause.of_data and name not in WITHOUT_SPECIMEN]
)
def test_every_cause_has_a_specimen(cause: str) -> None:
    columns = f"{TRUTH}cause", f"{TRUTH}latent_cause", f"{TRUTH_OF_BATCHES}cause"
    assert any(cause in line[column].split("|") for line in SPECIMENS.values() for column in columns)


def test_no_cause_without_specimen_has_one() -> None:
    assert not {line[f"{TRUTH}cause"] for line in SPECIMENS.values()} & WITHOUT_SPECIMEN


@pytest.mark.parametrize("name", DIFFERING)
def test_every_specimen_that_differs_has_a_cause_and_a_confidence_in_it(name: str) -> None:
    for tracer in ("native", "python"):
        said = truth(name, tracer)
        assert said["cause"] in CAUSES
        assert said["confidence"] in list(Confidence)
        # A thread's own noise is a value from outside to the tracer that does not see the thread.
        hidden = said["cause"] == "outside_value" and tracer == "python"
        assert (said["cause"] in ("other_ranks", "unknown")) == (said["confidence"] == "open" and not hidden)


def test_what_does_not_differ_has_no_cause() -> None:
    assert [name for name, line in SPECIMENS.items() if line[f"{TRUTH}cause"] and name not in DIFFERING] == []


def test_the_files_hold_the_models_that_the_list_names_each_once() -> None:
    files = sorted((data_folder() / "specimens").glob("[!_]*.py"))
    assert sorted(name for path in files for name in models_in(path)) == sorted(SPECIMENS)


def models_in(path: Path) -> list[str]:
    """The keys of ``MODELS`` in a zoo file, read off its text: an import of torch for each takes too long."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="MODELS")], value=ast.Dict(keys=keys)):
                return [ast.literal_eval(key) for key in keys if key is not None]
    return []


@pytest.mark.parametrize("name", [name for name in SPECIMENS if not name.endswith("_twin")])
def test_every_specimen_has_a_clean_twin_that_runs_in_the_same_modes_on_the_same_devices(name: str) -> None:
    twin, same = SPECIMENS[f"{name}_twin"], ("devices", *(f"skip_{mode}" for mode in MODES))
    assert twin[f"{TRUTH}accuracy"] == "pass"
    assert [twin[column] for column in same] == [SPECIMENS[name][column] for column in same]


def test_no_twin_is_without_its_specimen() -> None:
    assert all(name.removesuffix("_twin") in SPECIMENS for name in SPECIMENS)


def test_every_specimen_says_whether_it_differs_and_why() -> None:
    silent = [name for name, line in SPECIMENS.items() if not (line["note"] and line[f"{TRUTH}accuracy"])]
    traced = {name: said for name, said in TRUTHS.items() if not said["untraced"]}
    # Of replicas that drift apart it is where a collective is missing that matters, which is no place.
    placed = {name: bool(said["origin"] or said["cause"] == "unreduced_replica") for name, said in traced.items()}
    blameless = [name for name in traced if (name in DIFFERING) != placed[name]]
    assert (silent, blameless) == ([], [])


def test_truth_columns_are_columns_of_a_row() -> None:
    truths = {column.removeprefix(TRUTH) for column in SPECIMENS["message_passing"] if is_truth(column)}
    truths |= {c.removeprefix(TRUTH_OF_BATCHES) for c in SPECIMENS["message_passing"] if c.startswith(TRUTH_OF_BATCHES)}
    assert truths <= ROWS.columns.keys()


def test_hashbench_knows_no_specimen_by_name() -> None:
    # An installed wheel holds the zoo inside the package; its own files may name what they define.
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if "models" not in path.parts)
    assert [name for name in SPECIMENS if name in source] == []
