"""The synthetic ranks of the benchmark: a run in which one kernel differs, and everything behind the next meeting."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ranks_reading import write_folder
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.folder import read_both


def test_the_kernel_of_one_rank_differs_between_the_folders(tmp_path: Path) -> None:
    for name, differs in (("a", False), ("b", True), ("same", False)):
        write_folder(tmp_path / name, differs=differs, ranks=3, records=400)
    first, second = read_both(tmp_path / "a", tmp_path / "b")
    (found,) = find_across_ranks(first.traces, second.traces).first
    assert (found.rank, found.kernel, found.op_index) == (2, "aten.mm.default", 200)
    assert found.through == "rank 2: aten.mm -> all_reduce #4 of group 0-1-2 -> ranks 0, 1"
    first, same = read_both(tmp_path / "a", tmp_path / "same")
    assert find_across_ranks(first.traces, same.traces).equal
