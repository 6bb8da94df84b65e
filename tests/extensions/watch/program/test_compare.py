"""What two runs printed, and the step in which a line was printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.divergence import find
from hashbench.extensions.watch.program.compare import (
    LineDifference,
    TextDifference,
    compare_runs,
    differ_beside_addresses,
    first_divergence,
    texts_of,
)
from hashbench.extensions.watch.program.launch import ProgramRun
from hashbench.extensions.watch.program.looks import ProgramVerdict, RunRequest, steps_of
from hashbench.extensions.watch.program.task import STDOUT, Program, ProgramEnd
from hashbench.extensions.watch.program.text import finding_of
from tests.core.divergence.runs import Run

NOTHING = "Nothing was compared: the program printed nothing and ran no kernel"


def run_of(folder: Path, printed: bytes, *, status: int = 0, end: ProgramEnd | None = None, **files: bytes | None):
    """Return a run that printed this, and wrote these files."""
    folder.mkdir()
    (folder / STDOUT).write_bytes(printed)
    return ProgramRun(folder, status, ProgramEnd() if end is None else end, "", False, tuple(files.items()))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (b"a\nb\n", b"a\nb\n", []),
        (b"a\nb\n", b"a\nc\n", [TextDifference("", (LineDifference(2, "b", "c", 2),), 1)]),
        (b"a", b"a\nb", [TextDifference("", (LineDifference(2, None, "b", 2),), 1)]),
        (b"1%\r2%\n", b"1%\r3%\n", [TextDifference("", (LineDifference(1, "2%", "3%", 0),), 1)]),
        (b"a\0b", b"a\0c", [TextDifference("", words="byte 2 is the first that differs (3 and 3 bytes)")]),
    ],
    ids=["equal", "a line", "an end", "a progress bar", "bytes"],
)
def test_the_first_line_that_differs(tmp_path: Path, first: bytes, second: bytes, found: list[TextDifference]) -> None:
    assert list(texts_of(run_of(tmp_path / "a", first), run_of(tmp_path / "b", second))) == found


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        (b"<Net object at 0x7f01>\n", b"<Net object at 0x7f02>\n", False),
        (b"<Net object at 0x7f01> 1\n", b"<Net object at 0x7f02> 2\n", True),
        (b"at 0x7f01\n", b"at 0x7f02\n", True),
        (b"<Net object at 0x7f01>\n", b"<Net object at 0x7f02>", True),
    ],
    ids=["addresses", "a value beside them", "a number that the program writes", "an end of a line"],
)
def test_addresses_of_objects_are_no_difference(tmp_path: Path, first: bytes, second: bytes, differs: bool) -> None:
    runs = run_of(tmp_path / "a", b"", out=first), run_of(tmp_path / "b", b"", out=second)
    assert differ_beside_addresses(*runs) == ({"out"} if differs else frozenset())


def test_a_file_that_no_run_wrote_is_not_equal(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, b"line\n", out=None, kept=b"x") for name in ("a", "b")]
    verdict = compare_runs(*runs, most=1)
    assert (verdict.differs, verdict.gaps) == (False, ("No run wrote out: it was not compared.",))
    found = finding_of(ProgramVerdict(RunRequest(Program("script.py")), (verdict,)), kept=False)
    assert (found.equal, found.differs) == (False, False)
    assert found.headline == "The 2 runs agree, and not all was compared: 1 printed line and 1 file"


@pytest.mark.parametrize(
    ("printed", "status", "end", "words"),
    [
        (b"1\n", 0, "", "The 2 runs are equal: 1 printed line"),
        (b"1\n", 3, "exit code 3", "The 2 runs are equal: 1 printed line; all ended with exit code 3"),
        (b"", 1, "SyntaxError: x", f"{NOTHING}; all ended with SyntaxError: x"),
        (b"", -11, "", f"{NOTHING}; all killed by SIGSEGV"),
    ],
    ids=["by itself", "an exit code", "an exception", "a signal"],
)
def test_how_all_runs_ended_is_said(tmp_path: Path, printed: bytes, status: int, end: str, words: str) -> None:
    runs = [run_of(tmp_path / name, printed, status=status, end=ProgramEnd(end)) for name in ("a", "b")]
    verdict = ProgramVerdict(RunRequest(Program("script.py")), (compare_runs(*runs, most=1),))
    assert finding_of(verdict, kept=False).headline == words


def test_a_file_that_one_run_alone_wrote(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a", b"", out=None), run_of(tmp_path / "b", b"", out=b"x")
    assert list(texts_of(*runs)) == [TextDifference("out", words="only the second run wrote it")]


def test_ends_are_compared_by_their_kind_and_a_program_without_kernels_has_no_trace(tmp_path: Path) -> None:
    ended = [ProgramEnd(ended=words) for words in ("ValueError: at 1", "ValueError: at 2", "KeyError: 1")]
    runs = [run_of(tmp_path / str(number), b"", status=1, end=end) for number, end in enumerate(ended)]
    same, other = (compare_runs(runs[0], run, most=10) for run in runs[1:])
    assert (same.ends_differ, same.differs) == (False, False)
    assert (other.ends_differ, other.differs) == (True, True)
    assert (same.loop, same.traced, same.gaps) == (None, None, ())


def test_one_more_step_is_a_difference(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / str(steps), b"", end=ProgramEnd(torch=True, steps=steps)) for steps in (3, 4)]
    assert compare_runs(*runs, most=10).differs


@pytest.mark.parametrize(
    ("at", "steps"), [(0, (0, 1)), (7, (0, 1)), (8, (4, 5)), (20, (9, 10))], ids=["begin", "first", "later", "tail"]
)
def test_a_line_was_printed_in_the_step_after_which_there_were_more_bytes(
    tmp_path: Path, at: int, steps: tuple[int, int]
) -> None:
    end = ProgramEnd(torch=True, steps=9, prints=((1, 8), (5, 20)))
    runs = run_of(tmp_path / "a", b"", end=end), run_of(tmp_path / "b", b"", end=end)
    text = TextDifference("", (LineDifference(1, "a", "b", at),), 1)
    assert steps_of(compare_runs(*runs, most=10), [text]) == steps


FORWARD = "forward.0/Net/aten.mul.default#0"
BACKWARD_NODE = "backward.0/Net/aten.mul.default#0"
BACKWARD = f"b = mul input/0 (1 | 2) => b|B phase=backward forward_op={FORWARD} source=net.py:1"


@pytest.mark.parametrize(
    ("lines", "node"),
    [
        pytest.param("mul input/0 (1 | 2) -> a|A source=net.py:1", FORWARD, id="the forward op differs too"),
        pytest.param(
            "exp input/0 (1 | 2) -> a|A source=net.py:1\nmul input/0 (1 | 2) -> a|A source=net.py:1",
            "forward.0/Net/aten.exp.default#0",
            id="another op of the line differs before",
        ),
        pytest.param("mul input/0 -> a source=net.py:1", BACKWARD_NODE, id="the forward op is equal"),
        pytest.param(
            "exp input/0 (1 | 2) -> c|C source=net.py:9\nmul input/0 (1 | 2) -> a|A source=net.py:1",
            BACKWARD_NODE,
            id="another line differs before, and reaches nothing",
        ),
    ],
)
def test_the_forward_op_is_named_where_it_differs_first(lines: str, node: str) -> None:
    lines = f"{lines}\n{BACKWARD}"
    found = first_divergence(find(Run(lines).trace(), Run(lines, second=True).trace()))
    assert found is not None
    assert found.node == node


def test_what_reaches_no_result_is_named_where_nothing_else_is() -> None:
    lines = "mul input/0 (1 | 2) -> a|A\nb = exp input/0 => b"
    found = first_divergence(find(Run(lines).trace(), Run(lines, second=True).trace()))
    assert found is not None
    assert found.node == FORWARD
    equal = Run("b = exp input/0 => b")
    assert first_divergence(find(equal.trace(), equal.trace())) is None
