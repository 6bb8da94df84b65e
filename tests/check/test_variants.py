"""``--invariance``: tokens beside padding and after a cache; what is named, what is skipped and why."""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_helpers import FunctionRunner
from torch import nn

from hashbench import cli
from hashbench.batch import call_pair, locate
from hashbench.batch.layout import Cut, ItemAxis, ItemSubset
from hashbench.batch.match import Agreement, Match
from hashbench.catalog import INVARIANCES, Kind, Status, kind_of, letter_of
from hashbench.check import invariance_cause
from hashbench.check.model import run_model
from hashbench.check.subject import Subject
from hashbench.check.variants import VARIANTS, NotApplicableError, Variant, variants_of
from hashbench.cli.flags import invariances_of
from hashbench.records import SWEEP_MODES, ModelSpec, Row, RunOptions, flags_of_mode
from hashbench.results.load import load_sweep
from hashbench.results.rows import read_rows
from hashbench.run.workload import Tokens, Workload
from hashbench.suites import registry
from hashbench.suites.csv_file import data_folder

TRUTH = "truth_invariance_"


def truths() -> dict[str, dict[str, str]]:
    with (data_folder() / "specimens.csv").open(newline="", encoding="utf-8") as file:
        return {line["name"]: line for line in csv.DictReader(file) if line["truth_invariance"]}


TRUTHS = truths()


def options(invariance: str, **more: Any) -> RunOptions:
    return RunOptions(mode=f"{invariance}-invariance", deterministic="off", diagnose_budget=20.0, **more)


@pytest.fixture(scope="module")
def specimens() -> dict[str, ModelSpec]:
    return {spec.name: spec for spec in registry.catalog("specimens")}


def variant(invariance: str, model: nn.Module, inputs: Any, tokens: Tokens | None = None) -> Variant:
    (made,) = variants_of(Subject(model, model=model, inputs=inputs, tokens=tokens), invariance)
    return made


@pytest.mark.parametrize("name", TRUTHS)
def test_specimen_is_named_and_its_twin_passes(name, specimens):
    line = TRUTHS[name]
    row = run_model(specimens[name], options(line["truth_invariance"]))
    said = {column: line[f"{TRUTH}{column}"] for column in ("accuracy", "kernel", "cause")}
    assert {column: getattr(row, column) for column in said} == said, f"{row.detail} {row.because} {row.error}"


@pytest.mark.parametrize("invariance", [name for name in VARIANTS if name != "batch"])
def test_twin_of_tokens_has_every_invariance(invariance, specimens):
    row = run_model(specimens["decode_cache_twin"], options(invariance))
    assert (row.accuracy, row.benign, row.batch_sizes) == ("pass", 0, "")
    assert row.company


@pytest.mark.slow
def test_items_keep_places_only_in_smaller_batches(specimens):
    assert run_model(specimens["position_place"], options("batch")).accuracy == "pass"
    row = run_model(specimens["position_place"], options("position"))
    assert (row.company, row.batch_size) == ("8 items, and the same in reverse order", 8)
    assert "where an item lies in the batch decides too" in row.because
    assert row.max_abs_diff


@pytest.mark.parametrize(
    ("function", "accuracy", "kernel"),
    [
        (lambda x: x / x.abs().amax(1, keepdim=True), "pass", ""),
        (lambda x: x + torch.arange(len(x))[:, None], "fail_position_invariance", "aten.arange.default"),
        (lambda x: x.roll(1, 0) * 2, "fail_position_invariance", "aten.roll.default"),
        (lambda x: x.sum(), "pass_due_to_skip", ""),
    ],
)
def test_places_are_those_of_items_and_not_of_what_else_is_as_long(function, accuracy, kernel):
    runner = FunctionRunner(options("position"))
    runner.build = lambda: Workload(Computes(function), (torch.randn(8, 8),))
    row = runner.run_model(ModelSpec("zoo", "computes"))
    assert (row.accuracy, row.kernel) == (accuracy, kernel), f"{row.detail} {row.because} {row.error}"


@torch.library.custom_op("place_test::by_place", mutates_args=())
def by_place(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return (weight @ columns) * (1 + 0.001 * (torch.arange(columns.shape[1]) % 2))


def test_items_are_reversed_and_weights_are_not():
    weight = torch.randn(8, 8)
    runner = FunctionRunner(options("position"))
    runner.build = lambda: Workload(Computes(lambda x: by_place(weight, x.t().contiguous()).t()), (torch.randn(8, 8),))
    assert runner.run_model(ModelSpec("zoo", "computes")).kernel == "place_test.by_place.default"


def test_what_a_cache_lacks_is_said_where_no_kernel_can_be_blamed(specimens):
    row = run_model(specimens["decode_cache"], options("cached-decode"))
    assert "aten.cat.default#0 reads was made by an earlier run" in row.because


# ------------------------------------------------------------------------------------------------ a small transformer


class Attends(nn.Module):
    """One layer of attention on keys that are kept, in float32: what rounds does so by the number of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(32, 64), nn.Linear(64, 64)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, torch.Tensor]:
        new = self.project(self.embed(input_ids))
        known = new if past_key_values is None else torch.cat([past_key_values, new], dim=1)
        return {"logits": new * 2, "past_key_values": known} if use_cache else {"logits": new * 2}


def test_matrix_of_one_row_is_named_in_cached_decode(monkeypatch):
    def by_rows(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A linear layer that has another path for a single token, on any processor."""
        return (x * self.weight[0]).exp() if x.shape[1] > 1 else (x * self.weight[0]).exp2()

    monkeypatch.setattr(nn.Linear, "forward", by_rows)
    runner = FunctionRunner(options("cached-decode"))
    runner.build = lambda: Workload(Attends(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "attends"))
    assert (row.accuracy, row.kernel, row.module) == (
        "fail_cached_decode_invariance",
        "aten.exp2.default",
        "Attends.project",
    )
    assert row.shapes == "(2,1,64)"


class Forgetful(Attends):
    """Eleven tokens by another path, of which what comes after them knows by their cache alone."""

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, torch.Tensor]:
        new = self.embed(input_ids)
        new = new.exp2() if new.shape[1] == 11 else new.exp()
        known = new if past_key_values is None else torch.cat([past_key_values, new], dim=1)
        logits = new + known.sum(dim=1, keepdim=True)
        return {"logits": logits, "past_key_values": known} if use_cache else {"logits": logits}


def test_the_kernel_by_which_the_cache_came_to_differ_is_named():
    runner = FunctionRunner(options("cached-decode"))
    runner.build = lambda: Workload(Forgetful(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "forgetful"))
    assert (row.accuracy, row.kernel) == ("fail_cached_decode_invariance", "aten.exp2.default"), row.because
    assert "in the run of 11 tokens that made the cache" in row.detail


class Scans(nn.Module):
    """Goes through tokens one by one, from zero in every call: what a cache holds is not read."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:  # noqa: ARG002
        state, states = torch.zeros(len(input_ids)), []
        for token in input_ids.unbind(1):
            state = state * 0.5 + token.float()
            states.append(state)
        return {"logits": torch.stack(states, dim=1), "past_key_values": state}


def test_loop_over_tokens_is_not_attributable():
    runner = FunctionRunner(options("chunked-prefill"))
    runner.build = lambda: Workload(Scans(), {"input_ids": torch.arange(24).view(2, 12) % 5})
    row = runner.run_model(ModelSpec("zoo", "scans"))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", ""), row.because
    assert row.because.startswith("not attributable: a loop makes 12 calls like forward.0/Scans/aten.")
    assert "#0 in the one run and 6 in the other, and which of them are for the same tokens" in row.because


@pytest.mark.parametrize(
    ("invariance", "count", "expected"),
    [
        ("cached-decode", 12, ItemSubset(12, 1, 11, together=True)),
        ("chunked-prefill", 12, ItemSubset(12, 6, 6, together=True)),
        ("chunked-prefill", 13, ItemSubset(12, 6, 6, together=True)),
    ],
)
def test_which_tokens_come_after_a_cache_of_which(invariance, count, expected):
    model, inputs = Attends(), {"input_ids": torch.arange(2 * count).view(2, count)}
    it = variant(invariance, model, inputs)
    assert (it.subset, it.before.subset) == (expected, ItemSubset(12, expected.first, together=True))
    given = it.given(expected.size)(model, inputs)
    assert given["input_ids"].tolist() == inputs["input_ids"][:, expected.first : 12].tolist()
    assert given["past_key_values"].shape[1] == expected.first
    same = torch.ones(2, 5)
    assert it.rows(same, same) is None, "of all tokens in the one run, of the last ones in the other"


def test_tokens_for_tokens_are_an_items_in_both_dimensions():
    subset = ItemSubset(12, 6, together=True)
    scores = Match(Agreement.DIFFERENT, (12, 6), frozenset({1}), several=True)
    of_both = ItemAxis(1, 1, 6, (2,))
    assert locate._axis(scores, Cut(1, 1, ((2, 0, 6),)), subset, (), 6) == of_both
    assert locate._axis_of_size((2, 12, 12), subset) == of_both


@torch.library.custom_op("invariance_test::by_tokens", mutates_args=())
def by_tokens(x: torch.Tensor) -> torch.Tensor:
    return x * (1 if x.shape[1] <= 6 else 1.001)


class ByTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:  # noqa: ARG002
        return by_tokens(self.embed(input_ids))


@pytest.mark.parametrize(("invariance", "watched"), [("right-padding", 0), ("left-padding", 1)])
def test_of_a_call_the_tokens_are_watched_that_both_runs_have(invariance, watched, monkeypatch):
    calls = []

    def noted(call: Any, pair: Any, *, budget: float) -> Any:
        calls.append(call)
        return call_pair.diagnose(call, pair, budget=budget)

    monkeypatch.setattr(invariance_cause, "diagnose", noted)
    runner = FunctionRunner(options(invariance))
    runner.build = lambda: Workload(ByTokens(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "by_tokens"))
    assert (row.kernel, row.cause) == ("invariance_test.by_tokens.default", "shape_dependent_kernel"), row.because
    assert [(call.items, call.watched, call.axes) for call in calls] == [(2, watched, (ItemAxis(1, 1, 6),))]


@torch.library.custom_op("invariance_test::by_mask", mutates_args=())
def by_mask(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x * (1 if mask is None else 1.001)


class Masks(Attends):
    """Which tokens see which is said by a mask only where a cache came before."""

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, torch.Tensor]:
        new = self.embed(input_ids)
        known = new if past_key_values is None else torch.cat([past_key_values, new], dim=1)
        mask = None if past_key_values is None else torch.ones(new.shape[1], known.shape[1]).tril(6)
        logits = by_mask(new, mask)
        return {"logits": logits, "past_key_values": known} if use_cache else {"logits": logits}


def test_a_kernel_that_is_given_a_mask_in_one_run_only_is_named():
    runner = FunctionRunner(options("chunked-prefill"))
    runner.build = lambda: Workload(Masks(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "masks"))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", "invariance_test.by_mask.default"), (
        row.because
    )
    assert (row.cause, row.shapes) == ("shape_dependent_kernel", "(2,6,64)x(6,12)"), row.because
    far = re.search(r"([\d.e-]+) apart", row.detail)
    assert far is not None
    assert float(far[1]) < 0.1, "the same tokens are measured, not the first ones of both runs"


@torch.library.custom_op("invariance_test::by_strides", mutates_args=())
def by_strides(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return bias.softmax(-1).sum(-1)[:, None] * x * (1 if x.is_contiguous() else 1.001)


class Biased(nn.Module):
    """The mask is added to scores as minus infinity, and few tokens lie in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        bias = x.new_zeros(x.shape[1], x.shape[1]).masked_fill(attention_mask[:1] == 0, float("-inf"))
        return by_strides(bias, x if x.shape[1] > 6 else x.transpose(1, 2).contiguous().transpose(1, 2))


def test_masked_tokens_stay_hidden_in_repeated_calls():
    runner = FunctionRunner(options("right-padding"))
    runner.build = lambda: Workload(Biased(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "biased"))
    assert (row.kernel, row.cause) == ("invariance_test.by_strides.default", "shape_dependent_kernel"), row.because
    assert "it chooses by the order in memory" in row.because


class Counts(Attends):
    """A buffer that holds how many tokens came before, which each run reads and then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(()))

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, torch.Tensor]:
        new = self.embed(input_ids)
        known = new if past_key_values is None else torch.cat([past_key_values, new], dim=1)
        logits = new + self.before
        self.before += input_ids.shape[1]
        return {"logits": logits, "past_key_values": known} if use_cache else {"logits": logits}


def test_reader_of_a_changed_buffer_is_not_blamed():
    runner = FunctionRunner(options("chunked-prefill"))
    runner.build = lambda: Workload(Counts(), {"input_ids": torch.arange(24).view(2, 12)})
    row = runner.run_model(ModelSpec("zoo", "counts"))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", ""), row.because


class Computes(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Rounds(nn.Module):
    """Another path for more than three tokens, whatever they are, and where it ``leaks`` their sum with the padding."""

    def __init__(self, *, leaks: bool) -> None:
        super().__init__()
        self.embed, self.leaks = nn.Embedding(32, 4), leaks

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(input_ids)
        tokens = tokens.exp() if tokens.shape[1] > 3 else tokens.exp2()
        seen = tokens if self.leaks else tokens * attention_mask[..., None]
        return tokens + seen.sum(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("leaks", "cause", "because"),
    [
        (True, "batch_coupling", "other tokens in the padding change the others"),
        (False, "shape_dependent_kernel", "other tokens in the padding change nothing"),
    ],
)
def test_other_padding_tells_a_leak_from_rounding(leaks, cause, because):
    runner = FunctionRunner(options("right-padding"))
    runner.build = lambda: Workload(Rounds(leaks=leaks), {"input_ids": torch.arange(12).view(2, 6)})
    row = runner.run_model(ModelSpec("zoo", "rounds"))
    assert (row.kernel, row.cause) == ("aten.exp2.default", cause), row.because
    assert because in row.because


# ------------------------------------------------------------------------------------------ what cannot be given any

IDS = {"input_ids": torch.arange(24).view(2, 12)}


class Takes(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize(
    ("invariance", "inputs", "tokens", "reason"),
    [
        ("right-padding", (torch.ones(2, 3),), None, "its inputs have no names"),
        ("right-padding", {"pixels": torch.ones(2, 3)}, None, "no input_ids of batch and tokens"),
        ("right-padding", {"input_ids": torch.ones(2, 1).long()}, None, "1 tokens, and 2 are needed"),
        ("right-padding", IDS, None, "it takes no attention_mask"),
        ("left-padding", IDS, Tokens(positions=""), "it takes no position_ids"),
        ("cached-decode", IDS, None, "it takes no cache"),
        ("chunked-prefill", IDS, Tokens(use_cache=""), "it takes no cache"),
    ],
)
def test_inapplicable_model_is_skipped_with_a_reason(invariance, inputs, tokens, reason):
    workload = Workload(Takes(), inputs, tokens=tokens)
    with pytest.raises(NotApplicableError, match=reason):
        variant(invariance, workload.module, inputs, tokens)
    runner = FunctionRunner(options(invariance))
    runner.build = lambda: workload
    row = runner.run_model(ModelSpec("zoo", "takes"))
    assert row.accuracy == "pass_due_to_skip"
    assert reason in row.error


def test_a_model_that_returns_no_cache_is_skipped():
    class Forgets(Attends):
        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:  # noqa: ARG002
            return {"logits": self.embed(input_ids)}

    runner = FunctionRunner(options("cached-decode"))
    runner.build = lambda: Workload(Forgets(), dict(IDS))
    row = runner.run_model(ModelSpec("zoo", "forgets"))
    assert (row.accuracy, row.error) == (
        "pass_due_to_skip",
        "its output has no past_key_values, so that there is no cache",
    )


def test_padding_is_masked_and_positions_are_those_of_the_tokens():
    ids = torch.arange(12).view(2, 6)
    inputs = {"input_ids": ids, "token_type_ids": ids + 50, "decoder_input_ids": ids}
    it = variant("left-padding", Takes(), inputs, Tokens(padding=9))
    made = it.given(6)(Takes(), inputs)
    assert made["input_ids"][0].tolist() == [9, 9, 9, 0, 1, 2]
    assert made["token_type_ids"][0].tolist() == [0, 0, 0, 50, 51, 52]
    assert made["attention_mask"][0].tolist() == [0, 0, 0, 1, 1, 1]
    assert made["position_ids"][0].tolist() == [0, 0, 0, 0, 1, 2]
    assert made["decoder_input_ids"] is ids
    alone = it.given(3)(Takes(), inputs)
    assert alone["position_ids"][0].tolist() == [0, 1, 2]
    assert alone["input_ids"][0].tolist() == [0, 1, 2]


def test_a_mask_and_positions_that_the_inputs_have_are_kept():
    ids = torch.arange(12).view(2, 6)
    inputs = {"input_ids": ids, "attention_mask": ids % 2, "position_ids": ids + 7}
    made = variant("left-padding", Takes(), inputs, Tokens()).given(6)(Takes(), inputs)
    assert made["attention_mask"][0].tolist() == [0, 0, 0, 0, 1, 0]
    assert made["position_ids"][0].tolist() == [0, 0, 0, 7, 8, 9]


def test_common_part_of_an_output_is_compared():
    it = variant("left-padding", Takes(), {"input_ids": torch.arange(12).view(2, 6)}, Tokens())
    whole = torch.arange(12.0).view(2, 6)
    there, here = it.rows(whole, whole[:, :3])
    assert (there.tolist(), here.shape) == ([[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]], (2, 3))
    assert it.rows(whole, whole) == (whole, whole), "of no token"
    assert it.rows(torch.ones(2, 12), torch.ones(2, 6)) is None, "two places a token, in an order that is not known"
    assert it.rows(whole, whole[0]) is None


# --------------------------------------------------------------------------------------------- modes and their rows


def test_every_invariance_has_a_mode_status_and_flags():
    assert [one.name for one in INVARIANCES.values()] == list(VARIANTS)
    assert set(INVARIANCES) <= set(SWEEP_MODES)
    assert len({one.differs for one in INVARIANCES.values()}) == len(INVARIANCES)
    for mode, one in INVARIANCES.items():
        differs, fails = one.differs.at(4), one.fails.at(4)
        assert (kind_of(differs), kind_of(fails)) == (Kind.DIFFER, Kind.FAIL)
        assert differs.startswith(f"fail_{mode.replace('-', '_')}")
        assert letter_of(differs) == ("B" if one.differs is Status.BATCH_DIFFERS else "I")
        named = () if one.differs is Status.BATCH_DIFFERS else ("--invariance", one.name)
        assert flags_of_mode(mode) == ("--inference", "--batch-invariant", *named)
        assert (RunOptions(mode=mode).model_mode, RunOptions(mode=mode).invariance) == ("inference", one.name)


def test_words_stand_for_one_or_several_invariances():
    assert invariances_of("batch, padding,left-padding") == ("batch", "right-padding", "left-padding")
    assert invariances_of("position") == ("position",)
    assert invariances_of("decode") == ("cached-decode", "chunked-prefill")
    with pytest.raises(argparse.ArgumentTypeError, match="'crowd' is none of batch, position, padding"):
        invariances_of("batch,crowd")


def test_invariance_implies_batch_invariant(capsys):
    parsed = cli._parser().parse_args(["sweep", "--inference", "--tiny", "--invariance", "padding"])
    assert (parsed.batch_invariant, parsed.invariance) == (True, "padding")
    assert cli.main(["sweep", "--inference", "--tiny", "--invariance", "crowd"]) == 2
    assert "argument --invariance: 'crowd' is none of batch, position, padding" in capsys.readouterr().err


@pytest.mark.slow
def test_several_invariances_are_folders_of_one_sweep(tmp_path, capsys):
    out, only = tmp_path / "out", ["--only", "decode_positions", "padding_scale"]
    words = [
        "sweep",
        "--suite",
        "specimens",
        "--inference",
        "--batch-invariant",
        "--invariance",
        "left-padding,cached-decode",
    ]
    assert cli.main([*words, *only, "--output", str(out), "--diagnose-budget", "0"]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if "$ hashbench" in line)
    assert "--invariance cached-decode" in command
    rows = {(row.mode, row.name): row for row in load_sweep(out).rows}
    assert len(rows) == 4
    assert rows["cached-decode-invariance", "decode_positions"].accuracy == "fail_cached_decode_invariance"
    before = Path(out / "left-padding-invariance" / "accuracy.csv").read_bytes()
    assert cli.main([*words, *only, "--output", str(out), "--diagnose-budget", "0", "--resume"]) == 0
    assert Path(out / "left-padding-invariance" / "accuracy.csv").read_bytes() == before
    row: Row = read_rows(out / "cached-decode-invariance" / "accuracy.csv")[0]
    assert row.company == "the last token of 12 at once, and after a cache of the others"


# --------------------------------------------------------------------------------------------------------- repros


def first_place(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@pytest.mark.parametrize(
    ("invariance", "build", "script"),
    [
        ("left-padding", lambda: Workload(Sums(), IDS_AND_MASK), "PARTS = [((1, 1, 6, 6),)]"),
        ("position", lambda: Workload(Computes(first_place), torch.rand(4, 3)), "COMPARED = {0: 3, 1: 2, 2: 1, 3: 0}"),
    ],
)
def test_a_repro_compares_the_tokens_and_places_in_question(invariance, build, script, monkeypatch, tmp_path):
    monkeypatch.setattr(invariance_cause, "run_item_repro", lambda folder, timeout: f"{folder.name} {timeout > 0}")
    runner = FunctionRunner(options(invariance, output=str(tmp_path)))
    runner.build = build
    row = runner.run_model(ModelSpec("zoo", "model"))
    assert (row.repro, row.reproduced) == (
        f"repro/zoo.{invariance}-invariance.model",
        f"zoo.{invariance}-invariance.model True",
    )
    assert script in (tmp_path / row.repro / "repro.py").read_text(encoding="utf-8")


class Sums(nn.Module):
    """The last of the sums up to each token is another one beside padding on the left."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:  # noqa: ARG002
        return (input_ids + 1.5).cumsum(dim=1)


IDS_AND_MASK = {"input_ids": torch.arange(24).view(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}


def test_call_without_repro_says_why(tmp_path):
    runner = FunctionRunner(options("cached-decode", output=str(tmp_path)))
    runner.build = lambda: Workload(Forgetful(), dict(IDS))
    row = runner.run_model(ModelSpec("zoo", "model"))
    assert (row.kernel, row.repro) == ("aten.exp2.default", "")
    assert row.reproduced == "no repro: it cannot be made again alone"


def test_what_only_counts_has_no_repro_and_the_row_says_so(specimens, tmp_path):
    row = run_model(specimens["decode_positions"], options("cached-decode", output=str(tmp_path)))
    assert (row.kernel, row.repro) == ("aten.arange.start", "")
    assert row.reproduced == "no repro: it reads no tensor, and its arguments are others"
