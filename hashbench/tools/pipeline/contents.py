"""Digests of whatever passes through a pipeline: images, arrays, tensors, labels, nested in any way. Nothing here draws
a random number or changes what it looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from hashbench.run.outputs import NotComparableError, flatten
from hashbench.trace.digest import digest, python_digest


def content_digest(value: Any) -> str | None:
    """16 hexadecimal digits for all of ``value``; ``None`` where it holds something of a kind that cannot be hashed,
    such as an image that is not decoded yet (to decode it here could change how it is decoded later)."""
    hashed = xxhash.xxh3_64()
    try:
        for name, leaf in flatten(_without_images(value), "value"):
            found = digest(leaf) if isinstance(leaf, torch.Tensor) else python_digest(leaf)
            hashed.update(repr((name, *found)).encode(errors="surrogatepass"))
    except (NotComparableError, RecursionError):
        return None
    return hashed.hexdigest()


def _without_images(value: Any) -> Any:
    """``value`` with each image (as Pillow has them: bytes, mode and size) as a text."""
    if isinstance(value, Mapping):
        return {key: _without_images(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_without_images, value)] if value else value
    if not isinstance(value, torch.Tensor) and hasattr(value, "getbands") and hasattr(value, "tobytes"):
        if getattr(value, "tile", None):
            raise NotComparableError("an image that is not decoded yet")
        palette = value.getpalette() if value.mode == "P" else None
        return f"image {value.mode} {value.size} {palette} {xxhash.xxh3_64_hexdigest(value.tobytes())}"
    return value


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """The names of generators that are in another state in ``after``."""
    return tuple(name for name, state in before.items() if after.get(name, state) != state)


def first_numbers(values: Iterable[tuple[str, Any]], *, most: int = 10) -> dict[str, tuple[str, ...]]:
    """The first few numbers of each tensor by name, in full precision, for people to read."""
    found = {}
    for name, value in values:
        if isinstance(value, torch.Tensor):
            found[name] = tuple(repr(number) for number in value.detach().reshape(-1)[:most].cpu().tolist())
        else:
            found[name] = (repr(value)[:200],)
    return found
