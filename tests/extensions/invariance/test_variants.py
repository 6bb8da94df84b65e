"""``--invariance``: tokens beside padding and after a cache; what is named, what is skipped and why."""

from __future__ import annotations

import argparse
import csv
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import cli
from hashbench.cli.flags import invariances_of
from hashbench.core.catalog import INVARIANCES, Kind, Status, kind_of, letter_of
from hashbench.core.check.model import run_model
from hashbench.core.check.subject import Subject
from hashbench.core.records import SWEEP_MODES, ModelSpec, Row, RunOptions, flags_of_mode
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import read_rows
from hashbench.core.run.workload import Tokens, Workload
from hashbench.core.suites import registry
from hashbench.core.suites.csv_file import data_folder
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.variants import VARIANTS, NotApplicableError, Variant, variants_of
from tests.extensions.invariance.batch_invariance_helpers import IDS, Attends, Lambda, options, row_of
from tests.flat_rows import flat

TRUTH = "truth_invariance_"


def truths() -> dict[str, dict[str, str]]:
    with (data_folder() / "specimens.csv").open(newline="", encoding="utf-8") as file:
        return {line["name"]: line for line in csv.DictReader(file) if line["truth_invariance"]}


TRUTHS = truths()


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
    assert {column: getattr(flat(row), column) for column in said} == said, f"{row.detail} {row.because} {row.error}"


@pytest.mark.parametrize("invariance", [name for name in VARIANTS if name != "batch"])
def test_twin_of_tokens_has_every_invariance(invariance, specimens):
    row = run_model(specimens["decode_cache_twin"], options(invariance))
    assert (row.accuracy, row.benign, flat(row).batch_sizes) == ("pass", 0, "")
    assert flat(row).compared_with


@pytest.mark.slow
def test_items_keep_places_only_in_smaller_batches(specimens):
    assert run_model(specimens["position_place"], options("batch")).accuracy == "pass"
    row = run_model(specimens["position_place"], options("position"))
    assert (flat(row).compared_with, row.batch_size) == ("8 items, and the same in reverse order", 8)
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
    row = row_of(options("position"), lambda: Workload(Lambda(function), (torch.randn(8, 8),)))
    assert (row.accuracy, row.kernel) == (accuracy, kernel), f"{row.detail} {row.because} {row.error}"


@torch.library.custom_op("place_test::by_place", mutates_args=())
def by_place(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return (weight @ columns) * (1 + 0.001 * (torch.arange(columns.shape[1]) % 2))


def test_items_are_reversed_and_weights_are_not():
    weight = torch.randn(8, 8)
    module = Lambda(lambda x: by_place(weight, x.t().contiguous()).t())
    row = row_of(options("position"), lambda: Workload(module, (torch.randn(8, 8),)))
    assert row.kernel == "place_test.by_place.default"


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


# ------------------------------------------------------------------------------------------ what cannot be given any


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
    row = row_of(options(invariance), lambda: workload)
    assert row.accuracy == "pass_due_to_skip"
    assert reason in row.error


def test_a_model_that_returns_no_cache_is_skipped():
    class Forgets(Attends):
        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:  # noqa: ARG002
            return {"logits": self.embed(input_ids)}

    row = row_of(options("cached-decode"), lambda: Workload(Forgets(), dict(IDS)))
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


def test_model_that_makes_positions_from_the_mask_is_padded_on_the_left_where_it_says_so():
    class Counts(nn.Module):
        def __init__(self, *, by_mask: bool) -> None:
            super().__init__()
            self.by_mask, self.embed = by_mask, nn.Embedding(32, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            counted = attention_mask if self.by_mask else torch.ones_like(attention_mask)
            return self.embed(input_ids) * (counted.cumsum(1) * attention_mask).unsqueeze(2)

    ids = {"input_ids": torch.arange(12).view(2, 6)}
    for by_mask, accuracy in ((True, "pass"), (False, "fail_left_padding_invariance")):
        model = Counts(by_mask=by_mask)
        build = functools.partial(Workload, model, ids)
        assert "tokens=Tokens(positions=None)" in row_of(options("left-padding"), build).error
        build = functools.partial(build, tokens=Tokens(positions=None))
        assert row_of(options("left-padding"), build).accuracy == accuracy


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
    assert flat(row).compared_with == "the last token of 12 at once, and after a cache of the others"
