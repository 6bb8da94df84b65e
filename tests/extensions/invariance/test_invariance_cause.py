"""The kernel and the cause of items or tokens that differ in a variant, and the repro of the call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hashbench.core.check.model import run_model
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry
from hashbench.extensions.invariance import call_pair, invariance_cause
from hashbench.extensions.invariance.layout import ItemAxis
from tests.extensions.invariance.batch_invariance_helpers import IDS, Attends, Lambda, options, row_of
from tests.flat_rows import flat

SPECIMENS = {spec.name: spec for spec in registry.catalog("specimens")}


def test_what_a_cache_lacks_is_said_where_no_kernel_can_be_blamed():
    row = run_model(SPECIMENS["decode_cache"], options("cached-decode"))
    assert "aten.cat.default#0 reads was made by an earlier run" in row.because


def test_matrix_of_one_row_is_named_in_cached_decode(monkeypatch):
    def by_rows(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """A linear layer that has another path for a single token, on any processor."""
        return (x * self.weight[0]).exp() if x.shape[1] > 1 else (x * self.weight[0]).exp2()

    monkeypatch.setattr(nn.Linear, "forward", by_rows)
    row = row_of(options("cached-decode"), lambda: Workload(Attends(), dict(IDS)))
    assert (row.accuracy, row.kernel, row.module) == (
        "fail_cached_decode_invariance",
        "aten.exp2.default",
        "Attends.project",
    )
    assert flat(row).shapes == "(2,1,64)"


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
    row = row_of(options("cached-decode"), lambda: Workload(Forgetful(), dict(IDS)))
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
    row = row_of(options("chunked-prefill"), lambda: Workload(Scans(), {"input_ids": torch.arange(24).view(2, 12) % 5}))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", ""), row.because
    assert row.because.startswith("not attributable: a loop makes 12 calls like forward.0/Scans/aten.")
    assert "#0 in the one run and 6 in the other, and which of them are for the same tokens" in row.because


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
    row = row_of(options(invariance), lambda: Workload(ByTokens(), dict(IDS)))
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
    row = row_of(options("chunked-prefill"), lambda: Workload(Masks(), dict(IDS)))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", "invariance_test.by_mask.default"), (
        row.because
    )
    assert (row.cause, flat(row).shapes) == ("shape_dependent_kernel", "(2,6,64)x(6,12)"), row.because
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
    row = row_of(options("right-padding"), lambda: Workload(Biased(), dict(IDS)))
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
    row = row_of(options("chunked-prefill"), lambda: Workload(Counts(), dict(IDS)))
    assert (row.accuracy, row.kernel) == ("fail_chunked_prefill_invariance", ""), row.because


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
    row = row_of(
        options("right-padding"), lambda: Workload(Rounds(leaks=leaks), {"input_ids": torch.arange(12).view(2, 6)})
    )
    assert (row.kernel, row.cause) == ("aten.exp2.default", cause), row.because
    assert because in row.because


# --------------------------------------------------------------------------------------------------------- repros


def first_place(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@pytest.mark.parametrize(
    ("invariance", "build", "script"),
    [
        ("left-padding", lambda: Workload(Sums(), IDS_AND_MASK), "PARTS = [((1, 1, 6, 6),)]"),
        ("position", lambda: Workload(Lambda(first_place), torch.rand(4, 3)), "COMPARED = {0: 3, 1: 2, 2: 1, 3: 0}"),
    ],
)
def test_a_repro_compares_the_tokens_and_places_in_question(invariance, build, script, monkeypatch, tmp_path):
    monkeypatch.setattr(invariance_cause, "run_item_repro", lambda folder, timeout: f"{folder.name} {timeout > 0}")
    row = row_of(options(invariance, output=str(tmp_path)), build)
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
    row = row_of(options("cached-decode", output=str(tmp_path)), lambda: Workload(Forgetful(), dict(IDS)))
    assert (row.kernel, row.repro) == ("aten.exp2.default", "")
    assert row.reproduced == "no repro: it cannot be made again alone"


def test_what_only_counts_has_no_repro_and_the_row_says_so(tmp_path):
    row = run_model(SPECIMENS["decode_positions"], options("cached-decode", output=str(tmp_path)))
    assert (row.kernel, row.repro) == ("aten.arange.start", "")
    assert row.reproduced == "no repro: it reads no tensor, and its arguments are others"
