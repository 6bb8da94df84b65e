"""``--batch-invariant``: dynamo's statuses from smaller and smaller batches; what is no batch is not taken for one."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench import cli
from hashbench.core.catalog import WRITTEN, Kind, Status, family_of, kind_of, letter_of, status_of
from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, Row, RunOptions
from hashbench.core.report.compare import Became, compare
from hashbench.core.report.table import sweep_table
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import ROWS, read_rows, read_table, row_from_json, row_to_json
from hashbench.core.run.workload import Workload
from hashbench.extensions.invariance import check as invariance
from tests.extensions.invariance.batch_invariance_helpers import BATCH, checked
from tests.flat_rows import flat, made


def raises_below(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        if len(x) < size:
            raise ValueError(f"{len(x)} items")
        return x + 1

    return function


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory") if len(x) < 8 else ValueError("no")


STATUSES = {
    "each item by itself": (lambda x: x * 2, "pass", "4 2 1"),
    "a scale over the batch": (lambda x: x / x.abs().max(), "fail_batch_invariance_at_4", "4"),
    "a mean over the batch": (lambda x: x - x.mean(0), "fail_batch_invariance_at_4", "4"),
    "other code for one item": (lambda x: x.exp() if len(x) > 1 else x + 1, "fail_batch_invariance_at_1", "4 2 1"),
    "other code for few items": (lambda x: x.exp() if len(x) > 2 else x + 1, "fail_batch_invariance_at_2", "4 2"),
    "another structure": (lambda x: (x, x) if len(x) > 4 else x, "fail_batch_invariance_at_4", "4"),
    "the full batch raises": (raises_below(9), "fail_to_run", ""),
    "half of it raises": (raises_below(5), "fail_to_run_at_batch_4", ""),
    "one item raises": (raises_below(2), "fail_to_run_at_batch_1", "4 2"),
    "no output has the batch": (lambda x: x.sum(0), "pass_due_to_skip", "4 2 1"),
    "only a loss depends on it": (lambda x: (x * 2, x.mean()), "pass", "4 2 1"),
    "a table of as many rows as the batch": (lambda x: (x * 2, x.mean() + torch.zeros(8, 3)), "pass", "4 2 1"),
    "a table of as many rows as the half": (lambda x: (x * 2, x.mean() + torch.zeros(4, 3)), "pass", "4 2 1"),
    "the batch is the second dimension": (lambda x: (x * 2, x.t().repeat(2, 1)[:8]), "pass", "4 2 1"),
    "the number of items": (lambda x: (x * 2, len(x)), "pass", "4 2 1"),
}


@pytest.mark.parametrize(("function", "accuracy", "sizes"), STATUSES.values(), ids=STATUSES)
def test_status_names_the_largest_batch_that_differs(function, accuracy, sizes):
    row = checked(function)
    assert (row.accuracy, flat(row).batch_sizes, row.batch_size) == (accuracy, sizes, 8)
    assert (row.mode, row.threads is not None) == (BATCH_INVARIANCE, row.runs is not None)


def test_memory_that_runs_out_is_oom_whichever_batch_it_was():
    assert checked(out_of_memory).accuracy == "fail_to_run"
    assert checked(lambda x: out_of_memory(x) if len(x) < 8 else x).accuracy == "OOM"
    assert Status.OOM.ran_out_of_memory


def test_model_that_differs_from_itself_is_skipped():
    runs = itertools.count()
    row = checked(lambda x: x + next(runs))
    assert row.accuracy == "pass_due_to_skip"
    assert "two runs of the same 8 items differ" in row.error
    small = checked(lambda x: x if len(x) > 4 else x + next(runs))
    assert small.accuracy == "pass_due_to_skip"
    assert "two runs of the same 4 items differ" in small.error


def test_each_size_runs_a_fresh_copy_from_the_reset_state():
    row = checked(lambda x: x + torch.rand(()))
    assert row.accuracy == "pass"
    training = FunctionRunner(RunOptions(mode=BATCH_INVARIANCE, deterministic="off"))
    training.build = lambda: Workload(
        torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(6)), torch.randn(8, 6)
    )
    assert training.run_model(ModelSpec("zoo", "model")).accuracy == "pass"


# ------------------------------------------------------------------------------------------------ what is a batch


def test_which_batch_size_a_model_has():
    own, small = ModelSpec("zoo", "a", batch_size=16), ModelSpec("zoo", "b", batch_size=2)
    assert [BATCH.batch_size_of(spec) for spec in (own, small, ModelSpec("zoo", "c"))] == [16, 8, None]
    assert RunOptions(mode=BATCH_INVARIANCE, batch_size=4).batch_size_of(own) == 4
    assert RunOptions().batch_size_of(small) == 2


# ------------------------------------------------------------------------------------------------- words and reports


def test_words_with_a_batch_size_are_known_by_their_family():
    word = Status.BATCH_DIFFERS.at(4)
    assert (word, status_of(word), kind_of(word)) == ("fail_batch_invariance_at_4", Status.BATCH_DIFFERS, Kind.DIFFER)
    assert (kind_of("fail_to_run_at_batch_16"), letter_of(word)) == (Kind.FAIL, "B")
    assert family_of("fail_batch_invariance_at_<n>") == ""
    for strange in ("fail_batch_invariance_at_", "fail_batch_invariance_at_0", "fail_batch_invariance_at_x", "pass_4"):
        assert family_of(strange) not in WRITTEN


def row(accuracy: str, **more: Any) -> Row:
    return made("cpu", "net", 8, accuracy, suite="zoo", mode=BATCH_INVARIANCE, dtype="float32", **more)


def test_a_csv_holds_them_and_no_others(tmp_path):
    kept = row("fail_batch_invariance_at_4", smallest_batch=5, shapes="(4,2)x(2,3)", not_attributable=0)
    (tmp_path / "accuracy.csv").write_text(ROWS.text([kept]))
    assert read_rows(tmp_path / "accuracy.csv") == [kept]
    assert row_from_json(row_to_json(kept)) == kept
    (tmp_path / "accuracy.csv").write_text(ROWS.text([row("fail_batch_invariance_at_<n>")]))
    with pytest.raises(Exception, match="hashbench knows no such status"):
        ROWS.rows(read_table(tmp_path / "accuracy.csv"))


def sweep(*rows: Row) -> Sweep:
    return Sweep("sweep", rows, {}, "hashbench")


PAIRS = {
    "passes and differed": ("fail_batch_invariance_at_4", "pass", Became.FIXED),
    "differs and passed": ("pass", "fail_batch_invariance_at_4", Became.REGRESSED),
    "differs as before": ("fail_batch_invariance_at_4", "fail_batch_invariance_at_4", Became.STILL_DIFFERS),
    "differs from another size on": ("fail_batch_invariance_at_1", "fail_batch_invariance_at_4", Became.MOVED),
    "fails and differed": ("fail_batch_invariance_at_1", "fail_to_run", Became.REGRESSED),
    "is skipped and differed": ("fail_batch_invariance_at_1", "pass_due_to_skip", Became.NOW_SKIPPED),
}


@pytest.mark.parametrize(("base", "new", "outcome"), PAIRS.values(), ids=PAIRS)
def test_compare_knows_them(base, new, outcome):
    where = {"kernel": "aten.mm.default", "origin": "kernel"}
    rows = [row(word, **(where if kind_of(word) is Kind.DIFFER else {})) for word in (base, new)]
    (change,) = compare(sweep(rows[0]), sweep(rows[1])).changes
    if outcome is Became.REGRESSED and kind_of(base) is Kind.DIFFER:
        assert change.outcome.worse
    else:
        assert change.outcome is outcome
    assert change.outcome is not Became.MOVED or "at_1 → fail_batch_invariance_at_4" in change.note


def test_plain_rows_are_not_compared_with_invariance_rows():
    plain = Row("cpu", "net", 8, "pass", suite="zoo", mode="inference", dtype="float32")
    comparison = compare(sweep(plain), sweep(row("fail_batch_invariance_at_4")))
    assert (comparison.compared, comparison.unpaired) == (0, (1, 1))


def test_the_table_lists_them_with_what_to_do():
    rows = [row("fail_batch_invariance_at_4", kernel="aten.mm.default", advice="Pad the batch to 8")]
    table = sweep_table([*rows, Row("cpu", "b", 8, "fail_to_run_at_batch_2", error="no")], command=lambda _: "again")
    assert "fail_batch_invariance_at_4  aten.mm.default" in table
    assert "to do: Pad the batch to 8" in table
    assert "run it in plain Python at that batch size" in table


# ---------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("flag", ["--stress", "--untraced-pair", "--fingerprints"])
def test_flags_that_ask_for_something_else_are_refused(flag, capsys):
    assert cli.main(["sweep", "--inference", "--batch-invariant", flag]) == 2
    assert f"{flag} cannot be combined with --batch-invariant" in capsys.readouterr().err


def test_a_night_has_batch_invariance_as_a_mode(capsys):
    assert cli.main(["nightly", "--suite", "torchvision", "--", "--batch-invariant"]) == 2
    assert f"add {BATCH_INVARIANCE} to --modes" in capsys.readouterr().err


ZOO = """
import torch
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x / x.abs().max()
def scaled():
    return Scaled(), (torch.randn(8, 4),)
def relu():
    return torch.nn.ReLU(), (torch.randn(8, 4),)
MODELS = {"relu": relu, "scaled": scaled}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_sweep_writes_csv_and_table_and_resumes(tmp_path: Path, capsys):
    (tmp_path / "zoo.py").write_text(ZOO)
    words = ["sweep", "--suite", str(tmp_path / "zoo.py"), "--batch-invariant", "--output", str(tmp_path / "out")]
    assert cli.main([*words, "--training", "--strict"]) == 1
    said = capsys.readouterr()
    assert "always runs forward only" in said.err
    assert "2 models in batch-invariance: 1 fail_batch_invariance_at_4, 1 pass" in said.out
    (repro,) = (tmp_path / "out" / "repro").iterdir()
    assert f"$ python {repro / 'repro.py'}" in said.out
    rows = read_rows(tmp_path / "out" / "accuracy.csv")
    assert [(row.name, row.accuracy, row.mode) for row in rows] == [
        ("relu", "pass", BATCH_INVARIANCE),
        ("scaled", "fail_batch_invariance_at_4", BATCH_INVARIANCE),
    ]
    assert (rows[1].cause, rows[1].reproduced[:20]) == ("batch_coupling", "in a fresh process 4")
    assert cli.main([*words, "--inference", "--resume"]) == 0
    assert "2 of 2 rows are there already" in capsys.readouterr().err
    plain = [word for word in words if word != "--batch-invariant"]
    assert cli.main([*plain, "--inference", "--resume"]) == 2
    assert "mode was 'batch-invariance' and is 'inference'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ pytest


class Centred(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def failed(check: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        check(*arguments, **more)
    return " ".join(str(caught.value).split())


def test_an_assertion_passes_where_items_come_out_the_same(assert_batch_invariant):
    assert_batch_invariant(torch.nn.ReLU(), torch.randn(8, 6))
    assert_batch_invariant(lambda x, y: x * y, {"x": torch.randn(6, 4), "y": torch.randn(6, 1)}, sizes=(3, 5, 6))
    training = torch.nn.BatchNorm1d(6)
    assert_batch_invariant(training, (torch.randn(8, 6),))
    assert training.training, "the test's own module stays as it was"


def test_an_assertion_fails_with_a_report(assert_batch_invariant):
    said = failed(assert_batch_invariant, Centred(), torch.randn(9, 6), sizes=(3, 1, 7), diagnose=False)
    what = r"Centred: the same items differ between a batch of 7 and one of 9 in output \(42 elements"
    assert re.match(f"{what}.* first kernel: .* shapes: .* cause: .* to do: ", said), said


REFUSED = {
    "one item": ((torch.nn.ReLU(), torch.randn(1, 6)), {}, "its batch has one item"),
    "a larger batch": ((torch.nn.ReLU(), torch.randn(4, 6)), {"sizes": (9,)}, "not all from 1 to 3"),
    "two batches": ((torch.add, (torch.randn(4, 6), torch.randn(1, 6))), {}, "no batch size is known"),
    "no output of items": ((torch.sum, torch.randn(4, 6)), {}, "no output has the batch of 4"),
    "no model": ((3, torch.randn(4, 6)), {}, "needs a model to call"),
    "an unknown option": ((torch.nn.ReLU(), torch.randn(4, 6)), {"size": 1}, "has no option size"),
}


@pytest.mark.parametrize(("arguments", "more", "said"), REFUSED.values(), ids=REFUSED)
def test_an_assertion_that_would_show_nothing_fails(assert_batch_invariant, arguments, more, said):
    assert said in failed(assert_batch_invariant, *arguments, **more)


def test_what_the_model_raises_is_the_tests_own(assert_batch_invariant):
    with pytest.raises(ValueError, match="2 items") as caught:
        assert_batch_invariant(raises_below(3), torch.randn(8, 6))
    assert "(hashbench: with 2 of 8 items)" in caught.value.__notes__


# ---------------------------------------------------------------------------------------------------- the kernel


class Split(torch.nn.Module):
    """Adds the halves of a row first where there are more than four rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_sum(x)


@torch.library.custom_op("invariance_test::split_sum", mutates_args=())
def split_sum(x: torch.Tensor) -> torch.Tensor:
    rows = x.numpy().reshape(len(x), 4, -1)
    in_order = np.add.accumulate(rows, axis=-1)[..., -1]
    halves = sum(np.add.accumulate(part, axis=-1)[..., -1] for part in np.split(rows, 2, axis=-1))
    return torch.from_numpy(np.where(len(x) > 4, halves, in_order).astype(np.float32))


def test_kernel_has_place_shapes_and_smallest_batch():
    runner = FunctionRunner(replace(BATCH, diagnose_budget=20.0))
    net = torch.nn.Sequential(torch.nn.Hardtanh(), Split(), torch.nn.ReLU())
    runner.build = lambda: Workload(net, torch.randn(8, 1024))
    row = runner.run_model(ModelSpec("zoo", "net"))
    assert (row.accuracy, row.origin, row.kernel) == (
        "fail_batch_invariance_at_4",
        "kernel",
        "invariance_test.split_sum.default",
    )
    assert (row.module, row.source.partition(":")[0]) == ("Sequential.1", "test_check.py")
    assert (flat(row).shapes, flat(row).reference_shapes, flat(row).smallest_batch) == ("(4,1024)", "(8,1024)", 5)
    assert (row.cause, row.confidence, row.phase) == ("shape_dependent_kernel", "proven", "forward")
    assert (row.iteration, row.benign) == (0, 0), "the other iteration's is the same"
    assert "ULP" in row.detail
    assert row.advice
    assert row.evidence


def test_without_a_budget_the_kernel_is_named_and_no_cause():
    row = checked(lambda x: (x - x.mean(0)).relu())
    assert (row.kernel, row.cause, flat(row).not_attributable) == ("aten.mean.dim", "", 0)


def rolled_of_some(x: torch.Tensor) -> torch.Tensor:
    some = x[x[:, 0] > 0].flip(0)
    return x + some[0]


@pytest.mark.parametrize(
    ("function", "kernel", "why"),
    [
        (lambda x: x * (x > -100).sum(), "aten.sum.default", "0 of 3 repetitions"),
        (lambda x: x * torch.full((), 1 / len(x)), "aten.full.default", "0 of 3 repetitions"),
        (rolled_of_some, "aten.flip.default", "the call cannot be repeated on other items"),
    ],
    ids=["a count", "an argument", "no call that can be repeated"],
)
def test_coupling_without_experiments_is_likely(function, kernel, why):
    x = torch.tensor([1.0, -1, 2, 3, 4, -2, 5, 6])[:, None] * torch.arange(1.0, 7)
    row = checked(function, x, options=replace(BATCH, diagnose_budget=20.0))
    assert (row.kernel, row.cause, row.confidence) == (kernel, "batch_coupling", "likely"), row.because
    assert why in row.because


def private_noise(x: torch.Tensor, *, normal: bool) -> torch.Tensor:
    draw = torch.randn if normal else torch.rand
    return x + draw(x.shape, generator=torch.Generator().manual_seed(3))


# ----------------------------------------------------------------------- other ops for another number of items


@pytest.mark.slow
def test_assertion_names_other_ops_by_batch(assert_batch_invariant):
    table = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    said = failed(assert_batch_invariant, lambda x: torch.cdist(x, table), torch.randn(40, 5), sizes=(20,))
    assert " first kernel: aten._cdist_forward.default" in said
    assert " cause: shape_dependent_kernel, proven" in said
    said = failed(assert_batch_invariant, functools.partial(private_noise, normal=True), torch.ones(8, 6), sizes=(4,))
    assert " cause: batch_coupling, proven" in said
    said = failed(assert_batch_invariant, read_by_columns, torch.randn(8, 6), sizes=(4,))
    assert " first kernel: aten.exp.default" in said
    assert " cause: batch_coupling, proven" in said


# --------------------------------------------------------------------------------------------------------- views


def read_by_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x * 2, x.shape, (1, len(x))).exp()


def test_kernels_that_differ_and_are_rounded_away_are_counted():
    row = checked(lambda x: split_sum(x).isfinite(), torch.randn(8, 1024))
    assert (row.accuracy, row.kernel) == ("pass", "")
    assert (row.benign, row.benign_ops.partition(" ")[0]) == (2, "invariance_test.split_sum.default")
    assert checked(lambda x: x.relu()).benign == 0


@pytest.mark.parametrize(
    ("compute", "sizes"),
    [
        (lambda x: x * 2, [8, 4, 2, 1, 4, 8]),
        (lambda x: x - x.mean(0), [8, 4, 4, 8, 8]),  # the last one as far as the kernel
    ],
)
def test_no_run_is_made_that_another_shows(compute, sizes):
    begun, ended = [], []

    def function(x: torch.Tensor) -> torch.Tensor:
        begun.append(len(x))
        found = compute(x)
        ended.append(len(x))
        return found

    checked(function, options=replace(BATCH, iterations=1))
    assert begun == sizes
    assert ended == (sizes if sizes[2] == 2 else sizes[:4])


@pytest.mark.parametrize("part", ["compare_rows", "finding_of"])
def test_a_search_that_fails_leaves_the_status(monkeypatch, part):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(invariance, part, broken)
    row = checked(lambda x: x - x.mean(0))
    assert (row.accuracy, row.cause) == ("fail_batch_invariance_at_4", "unknown")
    assert "looking for the kernel failed: RuntimeError: a fault of ours" in row.because


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_the_page_shows_what_is_printed(tmp_path: Path, capsys, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "batch_invariance.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if "--only batch_scale" in line)
    shown = page.partition("```text\n")[2].partition("```")[0]
    shown = shown.replace("\n      ", " ")  # long lines are wrapped there
    monkeypatch.chdir(tmp_path)
    assert cli.main([*shlex.split(command)[1:], "--threads", "1"]) == 0
    printed = capsys.readouterr().out.replace(" --threads 1", "").replace(f"{tmp_path}/", "")

    def steady(text: str) -> list[str]:
        """Without what is measured: seconds, prices, and which of the remedies that work is the cheapest."""
        kept = re.sub(r": pad the batch.*|: compute one.*", "", re.sub(r" +\d+\.\d$", "", text, flags=re.MULTILINE))
        return [line for line in kept.splitlines() if line.strip("- ")]

    assert steady(printed) == steady(shown)
