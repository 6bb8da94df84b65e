"""What became of a model: the rule as a truth table, then whole sweeps."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hashbench.core.catalog import Kind, Status, kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.report.compare import Became, compare, decide, environment_changes, require_overlap
from hashbench.core.results.load import Requested, load_sweep
from tests.core.report.rows import DIFFERING, PLAIN, row, selection, sweep, write_rows, write_sweep

PASS, SKIP, DIFFER = "pass", "pass_due_to_skip", "eager_two_runs_differ"
LATENT, UNSTRESSED = "latent", {"stressed": False}
OTHER_BACKEND = {"same_backend": False}
OTHER_CONDITIONS, ELSEWHERE, UNASKED = {"comparable": False}, {"same_place": False}, {"selected": False}

TRUTH = {
    "passes as before": (PASS, PASS, {}, Became.UNCHANGED),
    "passed and now differs": (PASS, DIFFER, {}, Became.REGRESSED),
    "passed and now crashes": (PASS, "crashed", {}, Became.REGRESSED),
    "passed and now takes too long": (PASS, "timeout", {}, Became.REGRESSED),
    "passed and now fails in the first run": (PASS, "eager_1st_run_fail", {}, Became.REGRESSED),
    "passed and now fails in the second run": (PASS, "eager_2nd_run_fail", {}, Became.REGRESSED),
    "passed and now has no memory for the first run": (PASS, "eager_1st_run_OOM", {}, Became.REGRESSED),
    "passed and now has no memory for the second run": (PASS, "eager_2nd_run_OOM", {}, Became.REGRESSED),
    "passed and now does not load": (PASS, "model_fail_to_load", {}, Became.REGRESSED),
    "passed and now does not run": (PASS, "eager_fail_to_run", {}, Became.REGRESSED),
    "passed and its results can no longer be compared": (PASS, "results_not_comparable", {}, Became.REGRESSED),
    "passed and its compiled program is inaccurate": (PASS, "fail_accuracy", {}, Became.REGRESSED),
    "passed and now has a word that only dynamo knows": (PASS, "eager_fail", {}, Became.REGRESSED),
    "passed and now has a word that nobody knows": (PASS, "PASS", {}, Became.REGRESSED),
    "passed and is now skipped": (PASS, SKIP, {}, Became.NOW_SKIPPED),
    "passed and now has no row": (PASS, "", {}, Became.MISSING),
    "passed and was not asked for": (PASS, "", UNASKED, Became.NOT_SELECTED),
    "passes under other conditions": (PASS, PASS, OTHER_CONDITIONS, Became.PASSES_ELSEWHERE),
    "failed and passes under other conditions": ("crashed", PASS, OTHER_CONDITIONS, Became.PASSES_ELSEWHERE),
    "was skipped and passes under other conditions": (SKIP, PASS, OTHER_CONDITIONS, Became.PASSES_ELSEWHERE),
    "is skipped under other conditions": (PASS, SKIP, OTHER_CONDITIONS, Became.NOT_COMPARABLE),
    "is flaky under other conditions": (PASS, LATENT, OTHER_CONDITIONS, Became.NOT_COMPARABLE),
    "passes and compares no compiled program any more": (PASS, PASS, OTHER_BACKEND, Became.NOT_COMPARABLE),
    "passed and differs under other conditions": (PASS, DIFFER, OTHER_CONDITIONS, Became.NOT_COMPARABLE),
    "differs in the same place": (DIFFER, DIFFER, {}, Became.STILL_DIFFERS),
    "differs in another place": (DIFFER, DIFFER, ELSEWHERE, Became.MOVED),
    "differed and now passes": (DIFFER, PASS, {}, Became.FIXED),
    "differed and now passes, so the place is gone": (DIFFER, PASS, ELSEWHERE, Became.FIXED),
    "differed and is now skipped": (DIFFER, SKIP, {}, Became.NOW_SKIPPED),
    "differed and now crashes": (DIFFER, "crashed", {}, Became.FAILS_DIFFERENTLY),
    "differed and now has no row": (DIFFER, "", {}, Became.MISSING),
    "differs under other conditions": (DIFFER, DIFFER, OTHER_CONDITIONS, Became.NOT_COMPARABLE),
    "repaired by a setting": (DIFFER, PASS, OTHER_CONDITIONS, Became.PASSES_ELSEWHERE),
    "flaky and repaired by a setting": (LATENT, PASS, OTHER_CONDITIONS, Became.PASSES_ELSEWHERE),
    "passed under stress and now differs there": (PASS, LATENT, {}, Became.REGRESSED),
    "passed, nobody stressed it, and it differs there": (PASS, LATENT, UNSTRESSED, Became.NEW),
    "differs under stress as before": (LATENT, LATENT, {}, Became.STILL_DIFFERS),
    "differs under stress elsewhere": (LATENT, LATENT, ELSEWHERE, Became.MOVED),
    "differed under stress and now differs without": (LATENT, DIFFER, {}, Became.STILL_DIFFERS),
    "differed under stress and now differs elsewhere": (LATENT, DIFFER, ELSEWHERE, Became.REGRESSED),
    "differed under stress and now passes": (LATENT, PASS, {}, Became.FIXED),
    "differed now and then under stress, and now passes": (LATENT, PASS, {"always": False}, Became.NOT_SEEN),
    "differed and now does so under stress alone": (DIFFER, LATENT, {}, Became.NOT_SEEN),
    "differed under stress and now crashes": (LATENT, "crashed", {}, Became.REGRESSED),
    "differed under stress and is now skipped": (LATENT, SKIP, {}, Became.NOW_SKIPPED),
    "crashed and now differs under stress": ("crashed", LATENT, {}, Became.FIXED),
    "crashes as before": ("crashed", "crashed", {}, Became.STILL_FAILS),
    "takes too long as before": ("timeout", "timeout", {}, Became.STILL_FAILS),
    "failed to load and now crashes": ("model_fail_to_load", "crashed", {}, Became.FAILS_DIFFERENTLY),
    "failed in run 1 and now in run 2": ("eager_1st_run_fail", "eager_2nd_run_fail", {}, Became.FAILS_DIFFERENTLY),
    "crashed and now differs": ("crashed", DIFFER, {}, Became.FAILS_DIFFERENTLY),
    "crashed and now passes": ("crashed", PASS, {}, Became.FIXED),
    "crashed and is now skipped": ("crashed", SKIP, {}, Became.NOW_SKIPPED),
    "crashed and now has no row": ("crashed", "", {}, Became.MISSING),
    "crashed and was not asked for": ("crashed", "", UNASKED, Became.NOT_SELECTED),
    "is skipped as before": (SKIP, SKIP, {}, Became.STILL_SKIPPED),
    "was skipped and now passes": (SKIP, PASS, {}, Became.FIXED),
    "was skipped and now differs": (SKIP, DIFFER, {}, Became.REGRESSED),
    "was skipped and now crashes": (SKIP, "crashed", {}, Became.REGRESSED),
    "was skipped and now has no row": (SKIP, "", {}, Became.MISSING),
    "is new and passes": ("", PASS, {}, Became.NEW),
    "is new and differs": ("", DIFFER, {}, Became.NEW),
    "is new and was not even asked for": ("", PASS, UNASKED, Became.NEW),
    "is new, whatever the conditions": ("", PASS, OTHER_CONDITIONS, Became.NEW),
}


@pytest.mark.parametrize(("base", "new", "facts", "outcome"), TRUTH.values(), ids=TRUTH.keys())
def test_what_became_of_a_model(base, new, facts, outcome):
    assert decide(base, new, **facts) is outcome


def test_nothing_cannot_be_compared_with_nothing():
    with pytest.raises(ValueError, match="neither sweep has a row"):
        decide("", "")


@pytest.mark.parametrize("status", Status)
def test_only_pass_passes(status):
    assert (kind_of(status) is Kind.PASS) == (status == "pass")


@pytest.mark.parametrize("status", [word for word in Status if word != "pass"])
def test_whatever_is_not_a_pass_is_worse_than_one(status):
    assert decide("pass", status).worse


@pytest.mark.parametrize("base", Status)
def test_missing_row_is_worse_than_any_row(base):
    assert decide(base, "").worse


# --------------------------------------------------------------------------------------------------- sweeps


def only_change(base, new):
    (change,) = compare(sweep(base), sweep(new)).changes
    return change


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("dev", "cuda"),
        ("dtype", "bfloat16"),
        ("batch_size", 8),
        ("iterations", 3),
        ("runs", 5),
        ("deterministic", "warn"),
    ],
)
def test_other_conditions_are_named_and_not_comparable_but_for_what_passes(column, value):
    passes, differs = row(**{column: value}), row(**{column: value}, accuracy=DIFFER)
    assert only_change(PLAIN, differs).outcome is Became.NOT_COMPARABLE
    change = only_change(PLAIN, passes)
    assert (change.outcome, change.outcome.worse) == (Became.PASSES_ELSEWHERE, False)
    assert change.note == f"{column} {getattr(PLAIN, column)} → {value}"


@pytest.mark.parametrize(
    "column", ["seconds", "benign", "ops", "op_index", "traces", "env", "peak_memory_mib", "error"]
)
def test_irrelevant_columns_do_not_change_the_outcome(column):
    assert only_change(PLAIN, row(**{column: 3})).outcome is Became.UNCHANGED
    assert only_change(DIFFERING, dataclasses.replace(DIFFERING, **{column: 3})).outcome is Became.STILL_DIFFERS


def test_crashed_row_without_dtype_is_paired():
    crashed = row(accuracy="crashed", dtype="", batch_size=None, iterations=None, error="killed by signal 9")
    change = only_change(PLAIN, crashed)
    assert (change.outcome, change.note) == (Became.REGRESSED, "killed by signal 9")


@pytest.mark.parametrize(
    ("place", "note"),
    [
        ({"kernel": "aten.dot.default"}, "kernel aten.index_put_.default → aten.dot.default"),
        ({"origin": "rng"}, "origin kernel → rng"),
        ({"module": "layer2.0"}, "module layer1.0 → layer2.0"),
        ({"kernel": ""}, "kernel aten.index_put_.default → (none)"),
    ],
    ids=["another kernel", "another origin", "another module", "a kernel that is no longer known"],
)
def test_a_difference_that_moved_says_where_to(place, note):
    change = only_change(DIFFERING, dataclasses.replace(DIFFERING, **place))
    assert (change.outcome, change.note) == (Became.MOVED, note)


ORDERED = dataclasses.replace(
    DIFFERING, origin="sequence", kernel="aten.relu.default", cause="call_order", confidence="proven"
)
ELSEWHERE_NOW = {"kernel": "aten.tanh.default", "module": "layer2.0"}


@pytest.mark.parametrize(
    ("base", "new", "outcome"),
    [
        pytest.param({}, ELSEWHERE_NOW, Became.STILL_DIFFERS, id="an order shows elsewhere"),
        pytest.param({"confidence": "open"}, ELSEWHERE_NOW, Became.STILL_DIFFERS, id="an order of unknown cause"),
        pytest.param({"origin": "outside"}, {**ELSEWHERE_NOW, "origin": "outside"}, Became.STILL_DIFFERS, id="a value"),
        pytest.param({}, {**ELSEWHERE_NOW, "origin": "outside"}, Became.STILL_DIFFERS, id="an order shows as a value"),
        pytest.param({"confidence": "open"}, {"origin": "outside"}, Became.MOVED, id="a value, and nobody knows why"),
        pytest.param({}, {**ELSEWHERE_NOW, "cause": "control_flow"}, Became.MOVED, id="an order of another cause"),
        pytest.param({}, {"origin": "kernel"}, Became.MOVED, id="a kernel, of the same cause"),
        pytest.param(
            {"origin": "kernel"}, {"origin": "kernel", **ELSEWHERE_NOW}, Became.MOVED, id="a kernel elsewhere"
        ),
        pytest.param({"origin": "rng"}, {"origin": "rng", **ELSEWHERE_NOW}, Became.MOVED, id="other random numbers"),
    ],
)
def test_an_order_shows_where_it_happens_to(base, new, outcome):
    change = only_change(dataclasses.replace(ORDERED, **base), dataclasses.replace(ORDERED, **new))
    assert change.outcome is outcome


def test_an_order_that_shows_elsewhere_says_where_it_was():
    change = only_change(ORDERED, dataclasses.replace(ORDERED, **ELSEWHERE_NOW))
    assert change.note == "sequence: aten.tanh.default in layer2.0; in BASE sequence: aten.relu.default in layer1.0"
    assert only_change(ORDERED, ORDERED).note == "sequence: aten.relu.default in layer1.0"


def test_a_regression_says_where_it_differs():
    assert only_change(PLAIN, DIFFERING).note == "kernel: aten.index_put_.default in layer1.0"


def test_the_worst_comes_first_and_everything_is_kept():
    base = sweep(*(row(name) for name in "abcd"), row("e", "crashed"))
    new = sweep(row("a"), row("b", "crashed"), row("d", "pass_due_to_skip"), row("e"), row("f"))
    comparison = compare(base, new)
    assert [(change.key[-1], str(change.outcome)) for change in comparison.changes] == [
        ("b", "regressed"),
        ("d", "now skipped"),
        ("c", "missing"),
        ("e", "fixed"),
        ("f", "new"),
        ("a", "unchanged"),
    ]
    assert comparison.got_worse
    assert sum(comparison.counts.values()) == len(comparison.changes)


@pytest.mark.parametrize(
    ("base", "new", "worse"),
    [
        pytest.param([DIFFERING], [PLAIN, row("vgg11", "crashed")], False, id="one that was fixed and one that is new"),
        pytest.param([PLAIN], [], True, id="a sweep without rows"),
    ],
)
def test_whether_it_got_worse(base, new, worse):
    assert compare(sweep(*base), sweep(*new)).got_worse is worse


@pytest.mark.parametrize(
    ("new", "words"),
    [
        pytest.param([row("b"), row("c")], "nothing was compared: 1 row of BASE .* and 2 of NEW", id="other models"),
        pytest.param([row("a", mode="inference", dtype="")], "training float32 cpu.* inference cpu", id="another mode"),
        pytest.param([row("a", suite="timm")], "Name two results of the same models", id="another suite"),
        pytest.param([], "holds no rows: nothing was compared: 1 row of BASE", id="no rows"),
    ],
)
def test_sweeps_without_a_common_row_are_refused(new, words):
    with pytest.raises(HashbenchError, match=words):
        require_overlap(compare(sweep(row("a")), sweep(*new)))


def test_sweeps_with_a_common_row_are_compared():
    require_overlap(compare(sweep(row("a"), row("b")), sweep(row("b"))))


def test_a_base_without_rows_is_refused():
    with pytest.raises(HashbenchError, match="holds no rows"):
        compare(sweep(), sweep(PLAIN))


def test_whole_group_is_marked_and_worse_if_missing():
    training, inference = row("a"), row("a", mode="inference")
    comparison = compare(sweep(training, inference, row("b")), sweep(training))
    marks = {change.key: (change.outcome, change.whole_group) for change in comparison.changes}
    assert marks["torchvision", "inference", "float32", "cpu", "a"] == (Became.MISSING, True)
    assert marks["torchvision", "training", "float32", "cpu", "b"] == (Became.MISSING, False)
    assert comparison.got_worse


# ------------------------------------------------------------------------------------------------ selection


def selecting(*models, suite="torchvision", mode="training", device="cpu", dtype=""):
    return Requested(frozenset((suite, name) for name in models), mode=mode, device=device, dtype=dtype)


def test_models_that_were_not_asked_for_are_not_worse():
    base = sweep(*(row(f"model{number}") for number in range(100)))
    comparison = compare(base, sweep(row("model1"), selections=(selecting("model1"),)))
    assert comparison.counts == {Became.NOT_SELECTED: 99, Became.UNCHANGED: 1}
    assert not comparison.got_worse


@pytest.mark.parametrize(
    ("selections", "outcome"),
    [
        ((), Became.MISSING),
        ((selecting("a"),), Became.NOT_SELECTED),
        ((selecting("a", "b"),), Became.MISSING),
        ((selecting("a", mode="inference"),), Became.MISSING),
        ((selecting("a", suite="timm"),), Became.MISSING),
        ((selecting("a"), selecting("b")), Became.MISSING),
        ((selecting("a", "b", device="cuda"),), Became.NOT_SELECTED),
        ((selecting("a", "b", device="cpu", dtype="float32"),), Became.MISSING),
        ((selecting("a", "b", dtype="amp"),), Became.NOT_SELECTED),
    ],
    ids=[
        "nothing says what was asked for",
        "asked for another model",
        "asked for it",
        "asked in another mode only",
        "asked of another suite only",
        "one shard of two asked for it",
        "asked on another device",
        "asked on this device in this dtype",
        "asked in a different dtype",
    ],
)
def test_selected_model_without_a_row_is_missing(selections, outcome):
    comparison = compare(sweep(row("a"), row("b")), sweep(row("a"), selections=selections))
    assert {change.key[-1]: change.outcome for change in comparison.changes}["b"] is outcome


@pytest.mark.parametrize("named", ["", "accuracy.csv"], ids=["its folder", "its CSV"])
def test_folder_of_sweeps_may_have_lost_a_mode(tmp_path, named):
    write_sweep(tmp_path / "all" / "training", row("a"), selection=selection(row("a")))
    base = sweep(row("a"), row("a", mode="inference"))
    alone = compare(base, load_sweep(tmp_path / "all" / "training" / named))
    assert alone.counts == {Became.NOT_SELECTED: 1, Became.UNCHANGED: 1}
    assert compare(base, load_sweep(tmp_path / "all")).counts == {Became.MISSING: 1, Became.UNCHANGED: 1}


def test_suites_unknown_to_a_sweep_were_not_asked_for():
    base = sweep(row("a"), row("b", suite="timm"))
    whole = compare(base, sweep(row("a"), selections=(selecting("a"),)))
    assert whole.counts == {Became.NOT_SELECTED: 1, Became.UNCHANGED: 1}
    assert compare(base, sweep(row("a"))).counts == {Became.MISSING: 1, Became.UNCHANGED: 1}


def test_default_sweep_against_baseline_of_both_modes(tmp_path):
    expected = tmp_path / "expected"
    expected.mkdir()
    for mode in ("training", "inference"):
        write_rows(expected / f"torchvision_{mode}_cpu.csv", [row(name, mode=mode) for name in "abcdef"])
        now = [row(name, mode=mode) for name in "ab"]
        write_sweep(tmp_path / "now" / mode, *now, selection=selection(*now))
    comparison = compare(load_sweep(expected), load_sweep(tmp_path / "now"))
    assert comparison.counts == {Became.NOT_SELECTED: 8, Became.UNCHANGED: 4}
    assert not comparison.got_worse


def test_plain_sweeps_miss_no_invariance_of_the_baseline(tmp_path):
    expected, rows = tmp_path / "expected", [row(name, mode="batch-invariance") for name in "ab"]
    expected.mkdir()
    write_rows(expected / "plain.csv", [row("a"), row("a", mode="inference")])
    write_rows(expected / "batch-invariance.csv", rows)
    write_sweep(tmp_path / "now" / "training", row("a"), selection=selection(row("a")))
    comparison = compare(load_sweep(expected), load_sweep(tmp_path / "now"))
    assert comparison.counts == {Became.NOT_SELECTED: 2, Became.MISSING: 1, Became.UNCHANGED: 1}
    write_sweep(tmp_path / "now" / "batch", rows[0], selection=selection(*rows))
    comparison = compare(load_sweep(expected), load_sweep(tmp_path / "now"))
    assert comparison.counts == {Became.MISSING: 2, Became.UNCHANGED: 2}


# ---------------------------------------------------------------------------------------------- environments


def test_environment_changes_skip_volatile_keys():
    base = {"torch": {"version": "2.14", "cuda": None}, "threads": 2, "command_line": "a", "run": {"date": "1"}}
    new = {"torch": {"version": "2.15", "cuda": None}, "threads": 2, "command_line": "b", "run": {"date": "2"}, "x": 1}
    changes = environment_changes([base], [new])
    assert [(one.key, one.base, one.new) for one in changes] == [("torch.version", "2.14", "2.15"), ("x", "", "1")]


def test_environments_of_a_side_are_merged():
    (change,) = environment_changes([{"threads": 1}, {"threads": 2}], [{"threads": 2}])
    assert (change.base, change.new) == ("1 or 2", "2")


def test_only_environments_of_compared_rows_count():
    base = sweep(
        row("a", env="here"), row("b", env="elsewhere"), environments={"here": {"cpu": "X"}, "elsewhere": {"cpu": "Y"}}
    )
    new = sweep(row("a", env="now"), environments={"now": {"cpu": "X"}})
    assert compare(base, new).environment == ()


def test_unknown_environment_is_not_taken_for_equal():
    known = sweep(PLAIN, environments={"e1": {"cpu": "X"}})
    assert compare(known, known).remarks == ()
    (remark,) = compare(known, sweep(PLAIN)).remarks
    assert remark.startswith("NEW has no environment.json")


MACHINES = {
    "a": {"key": "a", "cpu": {"model": "X"}, "host": "one"},
    "b": {"key": "b", "cpu": {"model": "Y"}, "host": "two"},
    "a2": {"key": "a2", "cpu": {"model": "X"}, "host": "three"},
}
SKIPPED = row("q", "pass_due_to_skip", env="a")
ON_MACHINES = {
    # Where models ran for BASE and for NEW, the keys of the environment that changed, the remarks.
    "models that changed machines are named though both sweeps used the same ones": (
        [row("p", env="a"), row("q", env="b"), row("r", env="a")],
        [row("p", env="b"), row("q", env="b"), row("r", env="a")],
        [],
        (
            "BASE mixes 2 environments, which differ in cpu.model.",
            "NEW mixes 2 environments, which differ in cpu.model.",
            "1 of 3 models ran in another environment than in BASE, which may be why they changed: p.",
        ),
    ),
    "machines that differ in nothing that matters are one environment": (
        [row("p", env="a"), row("q", env="a2")],
        [row("p", env="a2"), row("q", env="a")],
        [],
        (),
    ),
    "one machine each needs no remark beside what changed": (
        [row("p", env="a")],
        [row("p", env="b")],
        ["cpu.model"],
        (),
    ),
    "what was skipped ran on no machine": (
        [row("p", env="a"), SKIPPED],
        [row("p", env="a"), dataclasses.replace(SKIPPED, env="b")],
        [],
        (),
    ),
    "a row that does not tell its environment is named": (
        [row("p", env="a")],
        [row("p", "crashed", env="")],
        ["cpu.model"],
        ("NEW does not say in which environment p ran.",),
    ),
}


@pytest.mark.parametrize(("base", "new", "changed", "remarks"), ON_MACHINES.values(), ids=ON_MACHINES)
def test_sweeps_on_several_machines(base, new, changed, remarks):
    comparison = compare(sweep(*base, environments=MACHINES), sweep(*new, environments=MACHINES))
    assert [change.key for change in comparison.environment] == changed
    assert comparison.remarks == remarks


# -------------------------------------------------------------------------------------------------- dynamo


def dynamo(*rows, kind="dynamo"):
    bare = [dataclasses.replace(one, suite="", mode="", dtype="", kernel="", origin="", module="") for one in rows]
    bare = [dataclasses.replace(one, iterations=None, runs=None, deterministic="", env="") for one in bare]
    return sweep(*bare, kind=kind)


ANYWHERE = dataclasses.replace(PLAIN, dev="", batch_size=None)


@pytest.mark.parametrize(
    ("base", "new", "counts"),
    [
        pytest.param(
            dynamo(DIFFERING, row("vgg11")),
            sweep(DIFFERING, row("vgg11", "timeout")),
            {Became.REGRESSED: 1, Became.STILL_DIFFERS: 1},
            id="its rows are matched by device and name",
        ),
        pytest.param(
            dynamo(ANYWHERE, kind="dynamo_expected"),
            sweep(PLAIN),
            {Became.UNCHANGED: 1},
            id="its expected rows are matched by name alone",
        ),
        pytest.param(
            dynamo(row(accuracy="fail_accuracy")), dynamo(PLAIN), {Became.FIXED: 1}, id="its own files can be compared"
        ),
    ],
)
def test_against_dynamo(base, new, counts):
    comparison = compare(base, new)
    assert comparison.counts == counts
    assert any("names no kernels" in remark for remark in comparison.remarks)


def test_another_device_than_dynamos_is_not_comparable():
    comparison = compare(dynamo(row(dev="cuda")), sweep(PLAIN))
    assert [change.note for change in comparison.changes] == ["dev cuda → cpu"]


def test_both_modes_against_file_without_modes_refused():
    with pytest.raises(HashbenchError, match="holds resnet18 more than once"):
        compare(dynamo(PLAIN), sweep(PLAIN, row(mode="inference")))


# --------------------------------------------------------------------------------------------- performance


@pytest.mark.slow
def test_many_rows_are_compared_in_linear_time(tmp_path):
    def seconds(count):
        started = time.process_time()
        comparison = compare(*(load_sweep(tmp_path / f"{side}{count}") for side in ("base", "new")))
        assert comparison.counts == {Became.UNCHANGED: count}
        return time.process_time() - started

    rows = [row(f"model{number}", seconds=number / 7, module="features.0.block") for number in range(4_000)]
    for count in (1_000, 4_000):
        for side in ("base", "new"):
            write_sweep(tmp_path / f"{side}{count}", *rows[:count])
    few, many = (min(seconds(count) for _ in range(2)) for count in (1_000, 4_000))
    assert many < 8 * few  # 4 times as long where time is linear, 16 times where it is quadratic, on any machine


def test_a_row_of_the_harness_has_no_backend_to_compare():
    old = dynamo(dataclasses.replace(PLAIN, suite="", mode="", dtype=""))
    (change,) = compare(old, sweep(dataclasses.replace(PLAIN, backend="inductor"))).changes
    assert change.outcome is Became.UNCHANGED
