"""Other runs of the same items or tokens that must not change them: in a smaller batch, in reverse order, beside
padding, after a KV cache of the tokens before. ``VARIANTS`` has a function for each
:class:`~hashbench.core.catalog.InvarianceKind`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from hashbench.core.check.subject import Subject
from hashbench.core.run.outcome import Given
from hashbench.core.run.outputs import Results
from hashbench.core.run.workload import Tokens, cache_among, map_tensors
from hashbench.extensions.invariance.batch_items import (
    NO_ITEMS,
    Compared,
    compare_items,
    first_items,
    halves,
    item_rows,
    why_not,
)
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class Variant:
    """Another run of items or tokens of a reference run.

    Attributes:
        subset: the items or tokens of the reference and of the other run.
        words: what is compared; "" for a smaller batch, which the row names by its size.
        made: size (:attr:`~hashbench.extensions.invariance.layout.ItemSubset.asked`) → makes the inputs of that run;
            runs of other sizes have the first items.
        cache: name of the cache among the outputs, which is not compared; "" without one.
        before: the run that made the cache of the other run.
        filled: makes the inputs of the reference with other tokens in the padding, which must not matter.
    """

    subset: ItemSubset
    words: str = ""
    made: Mapping[int, Given] = field(default_factory=dict)
    cache: str = ""
    before: Variant | None = None
    filled: Given | None = None

    @property
    def unit(self) -> str:
        """What is counted: ``items`` or ``tokens``."""
        return "tokens" if self.subset.together else "items"

    def given(self, size: int, beside: Neighbours | None = None) -> Given:
        """Return the function that makes the inputs of the run of ``size``; ``beside``: some items have other
        content."""
        return self.made.get(size) or (lambda _, inputs: first_items(inputs, size, self.subset.batch, beside))

    def said(self, size: int) -> str:
        """Name the run of ``size``."""
        return f"{abs(size)} {self.unit}" if self.words else f"a batch of {size}"

    def rows(self, reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the compared parts of a tensor of both runs: the items or tokens that both have, or all of a tensor
        without a token dimension; ``None`` if they cannot be located."""
        if not self.subset.together:
            rows = item_rows(self.subset.batch, self.subset.size)(reference, other)
            return rows if rows is None or not self.subset.turned else (rows[0], rows[1].flip(0))
        if reference.dim() != other.dim():
            return None
        sizes = [*zip(reference.shape, other.shape, strict=True)]
        scaled = [dim for dim, (there, here) in enumerate(sizes) if there != here]
        if any(sizes[dim] != (self.subset.batch, self.subset.size) for dim in scaled):
            return None
        if not scaled and self.cache:  # it is of all tokens in the one run and of the last ones in the other
            return None
        for dim in scaled:
            reference = reference.narrow(dim, self.subset.first, self.subset.size)
        return reference, other

    def compare(self, reference: Results, other: Results) -> Compared:
        """Compare the outputs of both runs."""
        missing = "it has no dimension of tokens" if self.words else NO_ITEMS
        return compare_items(self.without_cache(reference), self.without_cache(other), self.rows, missing=missing)

    def compare_alike(self, first: Results, second: Results, size: int) -> Compared:
        """Compare the outputs of two runs of one size."""
        rows = item_rows(abs(size), abs(size)) if not self.subset.together else lambda *tensors: tensors
        return compare_items(self.without_cache(first), self.without_cache(second), rows)

    def kept(self, reference: Results, other: Results) -> dict[str, torch.Tensor]:
        """Return the parts of the reference's outputs that are compared with the other run."""
        return {
            name: rows[0]
            for name, value in self.without_cache(reference).items()
            if isinstance(value, torch.Tensor)
            and isinstance(there := other.get(name), torch.Tensor)
            and (rows := self.rows(value, there)) is not None
        }

    def why_not(self, reference: Results) -> str:
        """Return why nothing can be compared with a reference of these results, else ""."""
        if not self.cache or any(self.cache in name.split(".") for name in reference):
            return ""
        return f"its output has no {self.cache}, so that there is no cache"

    def without_cache(self, results: Results) -> Results:
        """Return the outputs without the cache."""
        return {name: value for name, value in results.items() if not (self.cache and self.cache in name.split("."))}


class NotApplicableError(Exception):
    """The invariance cannot be checked on a model or function; the message says why."""


def variants_of(subject: Subject, invariance: str) -> tuple[Variant, ...]:
    """Return the runs that are compared with one reference, in this order, to check ``invariance``.

    Raises:
        NotApplicableError: it cannot be checked on this subject.
    """
    return VARIANTS[invariance](subject)


# ---------------------------------------------------------------------------------------------------------- items


def _batch(subject: Subject) -> int:
    reason = why_not(subject.inputs, subject.batch)
    if reason or subject.batch is None:
        raise NotApplicableError(reason)
    return subject.batch


def smaller_batches(subject: Subject, sizes: Sequence[int] = ()) -> tuple[Variant, ...]:
    """Return the first items alone, in each of these numbers; none: halves of the batch.

    Raises:
        NotApplicableError: the subject has no batch, or not so many items.
    """
    batch = _batch(subject)
    if any(not 1 <= size < batch for size in sizes):
        raise NotApplicableError(f"sizes={tuple(sizes)} are not all from 1 to {batch - 1}, one less than its batch")
    return tuple(Variant(ItemSubset(batch, size)) for size in sorted(sizes, reverse=True) or halves(batch))


def _reversed_items(subject: Subject) -> tuple[Variant, ...]:
    batch = _batch(subject)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) if tensor.shape[:1] == (batch,) else tensor

    words = f"{batch} items, and the same in reverse order"
    made = {-batch: lambda _, given: map_tensors(given, turned)}
    return (Variant(ItemSubset(batch, batch, turned=True), words, made),)


# --------------------------------------------------------------------------------------------------------- tokens


def _tokens_of(subject: Subject) -> tuple[Tokens, Mapping[str, Any]]:
    """Return the names of the subject's token arguments, and its inputs by name."""
    if not isinstance(subject.inputs, Mapping):
        raise NotApplicableError("its inputs have no names, so which are tokens is not known")
    if subject.tokens is not None:
        return subject.tokens, subject.inputs
    forward, known = getattr(subject.model, "forward", subject.model), Tokens()
    taken = () if forward is None else inspect.signature(forward).parameters
    mask, positions, use_cache = (
        name if name in taken else "" for name in (known.mask, "position_ids", known.use_cache)
    )
    return Tokens(mask=mask, positions=positions, cache=cache_among(taken), use_cache=use_cache), subject.inputs


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

    def of_decoder(name: str) -> bool:
        return name.startswith("decoder_")

    return [
        other
        for other, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape and of_decoder(other) == of_decoder(name)
    ]


def _padded(subject: Subject, *, left: bool) -> tuple[Variant, ...]:
    """Return the first half of the tokens alone; the reference has as much padding beside them."""
    tokens, inputs = _tokens_of(subject)
    count = _ids(inputs, tokens.ids, least=2).shape[1] // 2
    if not tokens.mask:
        raise NotApplicableError("it takes no attention_mask, so what is padding is not known")
    if left and tokens.positions == "":
        raise NotApplicableError(
            "it takes no position_ids, so that with padding on the left its tokens may have other positions by design; "
            "where it makes them from the mask, say so: tokens=Tokens(positions=None)"
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
    alone = Variant(
        ItemSubset(2 * count, count, count if left else 0, together=True),
        f"{count} tokens alone, and with {count} of padding on their {side}",
        {2 * count: lambda _, given: changed(given, count), count: lambda _, given: changed(given, 0)},
        filled=lambda _, given: changed(given, count, filled=True),
    )
    return (alone,)


def _after_cache(subject: Subject, *, chunked: bool) -> tuple[Variant, ...]:
    """Return the last tokens after a cache of the first; the reference has all of them at once."""
    tokens, inputs = _tokens_of(subject)
    count = _ids(inputs, tokens.decoded, least=4).shape[1]
    if not tokens.cache or not tokens.use_cache:
        raise NotApplicableError("it takes no cache: no past_key_values or cache with use_cache")
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
    prefill = Variant(
        ItemSubset(count, count - size, together=True),
        f"{count - size} tokens alone, and as the first of {count}",
        {count: at_once, count - size: lambda _, given: part(given, 0, count - size)},
        tokens.cache,
    )
    last = ItemSubset(count, size, count - size, together=True)
    return (Variant(last, words, {count: at_once, size: after}, tokens.cache, prefill),)


def _cache_of(output: Any, name: str) -> Any:
    cache = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if cache is None:
        raise NotApplicableError(f"its output has no {name}, so that there is no cache")
    return cache


VARIANTS: Mapping[str, Callable[[Subject], tuple[Variant, ...]]] = MappingProxyType(
    {
        "batch": smaller_batches,
        "position": _reversed_items,
        "right-padding": functools.partial(_padded, left=False),
        "left-padding": functools.partial(_padded, left=True),
        "cached-decode": functools.partial(_after_cache, chunked=False),
        "chunked-prefill": functools.partial(_after_cache, chunked=True),
    }
)
"""Name of an invariance → returns its variants of a subject."""
