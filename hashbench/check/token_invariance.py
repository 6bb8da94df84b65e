"""Run the same tokens of a sequence in two ways: beside padding, or after a KV cache of the tokens before.

For each invariance there are two runs: a reference, which has more tokens, and another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.batch.layout import ItemSubset
from hashbench.catalog import Status
from hashbench.run.workload import Tokens, cache_among, map_tensors

Given = Callable[[Callable[..., Any], Any], Any]
"""Makes the inputs of one run from its copy of the model and the full inputs."""

DIFFERS = {
    "position": Status.POSITION_DIFFERS,
    "right-padding": Status.RIGHT_PADDING_DIFFERS,
    "left-padding": Status.LEFT_PADDING_DIFFERS,
    "cached-decode": Status.CACHED_DECODE_DIFFERS,
    "chunked-prefill": Status.CHUNKED_PREFILL_DIFFERS,
}
"""Invariance → the status of a model that lacks it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of the same tokens.

    Attributes:
        subset: the tokens (or items) of the reference and of the other run.
        differs: the status if they differ.
        words: what is compared.
        reference: makes the inputs of the reference.
        other: makes those of the other run.
        cache: name of the cache among the outputs, which is not compared; "" without one.
        before: the two runs by which the cache of the other run was made.
        filled: the reference with other tokens in the padding, which must not matter.
        halved: makes the inputs of half the items, if both runs have all.
        unit: what is counted.
    """

    subset: ItemSubset
    differs: Status
    words: str
    reference: Given
    other: Given
    cache: str = ""
    before: Pair | None = None
    filled: Given | None = None
    halved: Given | None = None
    unit: str = "tokens"

    def given(self, size: int) -> Given:
        """Return the function that makes the inputs of the run of ``size``; see
        :attr:`~hashbench.batch.layout.ItemSubset.asked`."""
        if self.halved is not None and size == self.subset.half:
            return self.halved
        return self.reference if size == self.subset.batch else self.other

    def rows(self, reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the compared parts of a tensor of both runs: the tokens that both have; all of a tensor without a
        token dimension; ``None`` if the tokens cannot be located."""
        if reference.dim() != other.dim():
            return None
        if self.subset.turned:
            batched = reference.shape[:1] == (self.subset.batch,) == other.shape[:1]
            return (reference, other.flip(0)) if batched else None
        sizes = [*zip(reference.shape, other.shape, strict=True)]
        scaled = [dim for dim, (there, here) in enumerate(sizes) if there != here]
        if any(sizes[dim] != (self.subset.batch, self.subset.size) for dim in scaled):
            return None
        if not scaled and self.cache:  # it is of all tokens in the one run and of the last ones in the other
            return None
        for dim in scaled:
            reference = reference.narrow(dim, self.subset.first, self.subset.size)
        return reference, other

    def kept(self, reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the parts of the reference's outputs that are compared with the other run."""
        kept = {}
        for name, value in reference.items():
            beside = other.get(name)
            rows = None
            if isinstance(value, torch.Tensor) and isinstance(beside, torch.Tensor):
                rows = self.rows(value, beside)
            if rows is not None:
                kept[name] = rows[0]
        return kept

    def why_not(self, reference: Mapping[str, Any]) -> str:
        """Return why nothing can be compared with a reference of these results, else ""."""
        if not self.cache or any(self.cache in name.split(".") for name in reference):
            return ""
        return f"its output has no {self.cache}, so that there is no cache"

    def without_cache(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs without the cache."""
        return {name: value for name, value in results.items() if not (self.cache and self.cache in name.split("."))}


class NotApplicableError(Exception):
    """The invariance cannot be checked on a model or function; the message says why."""


def turned(batch: int) -> Pair:
    """Return the run of a batch, and that of the same items in reverse order."""

    def of_items(change: Callable[[torch.Tensor], torch.Tensor]) -> Given:
        def changed(tensor: torch.Tensor) -> torch.Tensor:
            return change(tensor) if tensor.shape[:1] == (batch,) else tensor

        return lambda _, given: map_tensors(given, changed)

    return Pair(
        ItemSubset(batch, batch, turned=True),
        DIFFERS["position"],
        f"{batch} items, and the same in reverse order",
        lambda _, given: given,
        of_items(lambda tensor: tensor.flip(0)),
        halved=of_items(lambda tensor: tensor[: batch // 2].clone()),
        unit="items",
    )


def pair_of(invariance: str, model: Callable[..., Any], inputs: Any, tokens: Tokens | None = None) -> Pair:
    """Return the two runs of a module or a function on these inputs that check ``invariance``.

    ``tokens`` names the arguments; ``None``: by the names that transformers uses.

    Raises:
        NotApplicableError: the invariance cannot be checked on it.
    """
    if not isinstance(inputs, Mapping):
        raise NotApplicableError("its inputs have no names, so that it cannot be told which are tokens")
    tokens = tokens or _tokens_taken(model)
    if invariance in ("right-padding", "left-padding"):
        return _padded(tokens, inputs, left=invariance == "left-padding")
    return _cached(invariance, tokens, inputs)


def _tokens_taken(model: Callable[..., Any]) -> Tokens:
    """Return the arguments of :class:`Tokens` that a model takes."""
    taken, known = inspect.signature(getattr(model, "forward", model)).parameters, Tokens()
    mask, positions, use_cache = (
        name if name in taken else "" for name in (known.mask, "position_ids", known.use_cache)
    )
    return Tokens(mask=mask, positions=positions, cache=cache_among(taken), use_cache=use_cache)


def _ids(inputs: Mapping[str, Any], name: str, *, least: int) -> torch.Tensor:
    ids = inputs.get(name)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise NotApplicableError(f"its inputs have no {name} of batch and tokens")
    if ids.shape[1] < least:
        raise NotApplicableError(f"its {name} have {ids.shape[1]} tokens, and {least} are needed")
    return ids


def _beside(inputs: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the names of the inputs with one value per token of ``name``; a decoder has tokens of its own."""
    shape = inputs[name].shape

    def of_decoder(one: str) -> bool:
        return one.startswith("decoder_")

    return [
        one
        for one, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape and of_decoder(one) == of_decoder(name)
    ]


# -------------------------------------------------------------------------------------------------------- padding


def _padded(tokens: Tokens, inputs: Mapping[str, Any], *, left: bool) -> Pair:
    """Return the first half of the tokens alone, and beside as much padding."""
    count = _ids(inputs, tokens.ids, least=2).shape[1] // 2
    if not tokens.mask:
        raise NotApplicableError("it takes no attention_mask, so that it cannot be told what is padding")
    if left and tokens.positions == "":
        raise NotApplicableError(
            "it takes no position_ids, so that with padding on the left its tokens may have other positions by design"
        )
    names = _beside(inputs, tokens.ids)

    def changed(given: Mapping[str, Any], beside: int, *, filled: bool = False) -> dict[str, Any]:
        def of_tokens(value: torch.Tensor, filling: int) -> torch.Tensor:
            padding = value.new_full((value.shape[0], beside, *value.shape[2:]), filling)
            return torch.cat([padding, value] if left else [value, padding], dim=1)

        new = {**given}
        ids = given[tokens.ids][:, :count]
        for name in names:
            new[name] = of_tokens(given[name][:, :count], tokens.padding if name == tokens.ids else 0)
        if filled:  # by the tokens themselves, which the model knows
            new[tokens.ids] = torch.cat([ids, ids], dim=1)
        if tokens.mask not in names:
            new[tokens.mask] = of_tokens(torch.ones_like(ids), 0)
        if left and tokens.positions and tokens.positions not in names:
            positions = torch.arange(count, device=ids.device).expand(len(ids), -1)
            new[tokens.positions] = of_tokens(positions, 0)
        return new

    side = "left" if left else "right"
    return Pair(
        ItemSubset(2 * count, count, count if left else 0, together=True),
        DIFFERS[f"{side}-padding"],
        f"{count} tokens alone, and with {count} of padding on their {side}",
        lambda _, given: changed(given, count),
        lambda _, given: changed(given, 0),
        filled=lambda _, given: changed(given, count, filled=True),
    )


# --------------------------------------------------------------------------------------------------------- caches


def _cached(invariance: str, tokens: Tokens, inputs: Mapping[str, Any]) -> Pair:
    """Return all tokens at once, and the last ones after a cache of the first."""
    count = _ids(inputs, tokens.decoded, least=4).shape[1]
    if not tokens.cache or not tokens.use_cache:
        raise NotApplicableError("it takes no cache: no past_key_values or cache with use_cache")
    chunked = invariance == "chunked-prefill"
    count -= count % 2 if chunked else 0
    size = count // 2 if chunked else 1
    names = _beside(inputs, tokens.decoded)

    def part(given: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {**given, **{name: given[name][:, start:stop] for name in names}, tokens.use_cache: True}

    def after(model: Callable[..., Any], given: Any) -> Any:
        output = model(**part(given, 0, count - size))
        return {**part(given, count - size, count), tokens.cache: _cache_of(output, tokens.cache)}

    def at_once(_: Callable[..., Any], given: Any) -> Any:
        return part(given, 0, count)

    words = f"the last {f'{size} tokens' if chunked else 'token'} of {count} at once, and after a cache of the others"
    prefill = Pair(
        ItemSubset(count, count - size, together=True),
        DIFFERS[invariance],
        f"{count - size} tokens alone, and as the first of {count}",
        at_once,
        lambda _, given: part(given, 0, count - size),
        tokens.cache,
    )
    last = ItemSubset(count, size, count - size, together=True)
    return Pair(last, DIFFERS[invariance], words, at_once, after, tokens.cache, prefill)


def _cache_of(output: Any, name: str) -> Any:
    cache = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if cache is None:
        raise NotApplicableError(f"its output has no {name}, so that there is no cache")
    return cache
