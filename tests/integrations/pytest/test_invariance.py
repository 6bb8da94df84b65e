"""``assert_batch_invariant(…, invariance=…)``: the invariances of ``--invariance``, in a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.run.workload import Tokens

DOCS = Path(__file__).parents[3] / "docs" / "pytest.md"
IDS = {"input_ids": torch.arange(24).view(2, 12)}
DECODES = ("cached_decode", "chunked_prefill")


class Sums(torch.nn.Module):
    """A token becomes the sum of all up to it: whole numbers, so that it is the same in any batch. With a ``fault``
    tokens after a cache are counted from zero, or those on their right are added."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> dict[str, torch.Tensor]:
        before = 0 if past_key_values is None or self.fault == "cache" else past_key_values[:, -1:]
        seen = input_ids if attention_mask is None or self.fault == "mask" else input_ids * attention_mask
        sums = (seen.cumsum(dim=1) + before).double()
        if self.fault == "mask":
            sums = sums + seen.sum(dim=1, keepdim=True)
        shown = sums if position_ids is None else sums + 0 * position_ids
        return {"logits": shown, "past_key_values": sums} if use_cache else {"logits": shown}


def failed(check: Any, *arguments: Any, **more: Any) -> str:
    """The message of a failure, with single spaces between its words."""
    with pytest.raises(pytest.fail.Exception) as caught:
        check(*arguments, **more)
    return " ".join(str(caught.value).split())


@pytest.mark.slow
def test_invariant_models_pass(assert_batch_invariant: Any) -> None:
    model = Sums().train()
    assert_batch_invariant(model, IDS, invariance="batch,position,padding,decode", tokens=Tokens(padding=20))
    assert model.training, "the test's own module stays as it was"
    assert_batch_invariant(lambda x, y: x * y, (torch.randn(6, 4), torch.randn(6, 1)), invariance=["position"])


def test_each_broken_invariance_is_reported(assert_batch_invariant: Any) -> None:
    said = failed(assert_batch_invariant, Sums("cache"), IDS, invariance=("padding", "decode"), diagnose=False)
    first, second = said.split("Sums: the same tokens differ between the last ")[1:]
    assert first.startswith("token of 12 at once, and after a cache")
    assert second.startswith("6 tokens of 12 at once, and after a")
    assert "aten.cumsum.default" in first


@pytest.mark.slow
def test_the_cause_and_the_repro_are_those_of_a_sweep(assert_batch_invariant: Any) -> None:
    said = failed(assert_batch_invariant, Sums("mask"), IDS, invariance="right-padding", tokens=Tokens(padding=1))
    assert " first kernel: aten." in said
    assert re.search(" cause: batch_coupling, .*other tokens in the padding change the others", said), said


def second_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1.0, 1 + len(x))[:, None]


def test_items_in_reverse_order_keep_nothing_of_their_places(assert_batch_invariant: Any) -> None:
    assert_batch_invariant(second_place, torch.ones(8, 2))
    said = failed(assert_batch_invariant, second_place, torch.ones(8, 2), invariance="position", diagnose=False)
    assert said.startswith("second_place: the same items differ between 8 items, and the same in reverse order")


class NoMask(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def no_cache(input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> torch.Tensor:  # noqa: ARG001
    return input_ids


REFUSED: Mapping[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "no mask": (
        NoMask(),
        IDS,
        {"invariance": "right-padding"},
        "right-padding invariance cannot be checked: it takes no attention_mask",
    ),
    "no positions": (
        Sums(),
        IDS,
        {"invariance": "left-padding", "tokens": Tokens(positions="")},
        "takes no position_ids",
    ),
    "no cache taken": (
        NoMask(),
        IDS,
        {"invariance": "decode"},
        "cached-decode invariance cannot be checked: it takes no cache",
    ),
    "no cache given": (no_cache, IDS, {"invariance": "cached-decode"}, "its output has no past_key_values"),
    "no names": (Sums(), IDS["input_ids"], {"invariance": "padding"}, "its inputs have no names"),
    "one item": (Sums(), torch.ones(1, 2), {"invariance": "position"}, "its batch has one item"),
    "no such invariance": (Sums(), IDS, {"invariance": "crowd"}, "'crowd' is none of batch, position, padding"),
    "no invariance": (Sums(), IDS, {"invariance": ()}, "invariance must not be empty"),
    "sizes of no batch": (
        Sums(),
        IDS,
        {"invariance": "decode", "sizes": (1,)},
        "sizes= requires invariance 'batch', got",
    ),
    "tokens of items": (
        Sums(),
        IDS,
        {"invariance": "position", "tokens": Tokens()},
        "requires an invariance of tokens",
    ),
}


@pytest.mark.parametrize(("model", "inputs", "more", "said"), REFUSED.values(), ids=REFUSED)
def test_inapplicable_invariance_is_refused(
    assert_batch_invariant: Any, model: Any, inputs: Any, more: dict[str, Any], said: str
) -> None:
    assert said in failed(assert_batch_invariant, model, inputs, **more)


def test_what_the_model_raises_is_the_tests_own(assert_batch_invariant: Any) -> None:
    def raises(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 6:
            raise ValueError("six tokens")
        return input_ids * attention_mask

    with pytest.raises(ValueError, match="six tokens") as caught:
        assert_batch_invariant(raises, IDS, invariance="right-padding")
    assert "(hashbench: comparing 6 tokens alone, and with 6 of padding on their right)" in caught.value.__notes__


@pytest.mark.slow
def test_documented_failure_is_that_of_its_example(assert_batch_invariant: Any) -> None:
    code, shown = re.findall(
        r"```python\n(import torch\n\n\nclass Encoder.*?)```.*?```text\n(.*?)```", DOCS.read_text(), re.DOTALL
    )[0]
    names: dict[str, Any] = {"__name__": "test_example"}
    exec(compile(code, "test_example.py", "exec"), names)
    said = failed(names["test_padding"], assert_batch_invariant)

    def steady(text: str) -> str:
        return re.sub(r"\d[\d.e-]*|Next: .*", "", text)

    assert steady(said) == steady(" ".join(shown.split())), said
