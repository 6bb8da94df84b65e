"""Variations of the inputs of a kernel: what each is for, and how it is made.

Inputs keep their meaning (:class:`~hashbench.extensions.kernels.inputs.Meaning`): what was not negative is not, sorted
values are sorted, masks and bools stay. Each variation is drawn from the seed alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.run.distance import wide
from hashbench.core.trace.arguments import mapped
from hashbench.extensions.kernels.inputs import (
    KernelInputs,
    free_sizes,
    is_discrete,
    keep_meaning,
    meaning_of,
    prime_below,
    resized,
)

REDUCED = 256
"""Sizes are cut to so many elements where a variation does not need them."""

_SMALL = 2**18
"""Inputs with so many elements in all are not cut."""

_LARGEST = 2**22
"""Elements of all inputs that a larger size may lead to."""

_BORDERS = (0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
"""Elements at both sides of where a block may end."""

_SEPARATELY = 4
"""Inputs that get a NaN or an infinity one after the other."""


@dataclass(frozen=True, slots=True)
class Varied:
    """Inputs that were varied.

    Attributes:
        inputs: the arguments.
        meaning: what was varied, a clause.
        follows: other arguments to try where the reference refuses these.
        layout: only where elements lie in memory was varied.
    """

    inputs: KernelInputs
    meaning: str
    follows: tuple[KernelInputs, ...] = ()
    layout: bool = False


@dataclass(frozen=True, slots=True)
class Variation:
    """A way to vary inputs.

    Attributes:
        name: as it is turned off by.
        vary: yields varied inputs, none where it is not applicable.
        idle: why it is not applicable where it yields none.
        shapes: it varies what a kernel may refuse: sizes, strides, alignment, dtypes.
        backward: gradients are judged as well.
    """

    name: str
    vary: Callable[[KernelInputs, torch.Generator], Iterator[Varied]]
    idle: str = "no input has numbers to vary"
    shapes: bool = False
    backward: bool = False


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator that a variation draws from."""
    return torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))


def chosen(without: Collection[str], names: Sequence[str]) -> frozenset[str]:
    """Return the names of variations to leave out.

    Raises:
        HashbenchError: there is no variation of such a name.
    """
    given = [without] if isinstance(without, str) else list(without)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise HashbenchError(
            f"there is no variation {unknown[0]!r}",
            consequence="nothing was judged",
            tip=f"Those that can be left out are {', '.join(name for name in names if name != 'given')}.",
        )
    if "given" in given:
        raise HashbenchError(
            "the inputs as they are given cannot be left out", tip="Give the inputs that you want to be judged."
        )
    return frozenset(given)


def reductions(inputs: KernelInputs) -> Iterator[KernelInputs]:
    """Yield smaller inputs for variations that do not need the size, the smallest first; the given ones at last."""
    if _elements(inputs) > _SMALL:
        large = [size for size in free_sizes(inputs) if size > REDUCED]
        cuts = iter([REDUCED, REDUCED - 64, REDUCED // 2, *range(REDUCED + 64, 2**10, 64)])
        apart = {size: next(cuts) for size in large[:12]}
        factor = max(1, -(-max(large, default=1) // REDUCED))
        factor = 1 << (factor - 1).bit_length()
        together = {size: size // factor for size in free_sizes(inputs) if size % factor == 0 and size // factor >= 8}
        for sizes in (apart, together):
            for follow in (True, False):
                if sizes and any(size > to for size, to in sizes.items()):
                    yield resized(inputs, sizes, integers=follow)
    yield inputs


# ------------------------------------------------------------------------------------------------- values, one by one


def _changed(inputs: KernelInputs, change: Callable[[torch.Tensor, int], torch.Tensor | None]) -> KernelInputs | None:
    """Return inputs whose free floating and complex tensors are changed, to float64 values that keep their meaning;
    ``None`` if no tensor was changed."""
    leaves, changed = list(inputs.leaves), False
    for number, tensor in inputs.tensors():
        meaning = meaning_of(tensor)
        if meaning.fixed:
            continue
        values = change(wide(tensor), number)
        if values is not None:
            leaves[number], changed = keep_meaning(values, tensor, meaning), True
    return inputs.having(leaves) if changed else None


def _seeds(inputs: KernelInputs, generator: torch.Generator) -> Iterator[Varied]:
    """Other values: those given in another order; for a constant, from half of it to three halves."""

    def draw(values: torch.Tensor, _: int) -> torch.Tensor:
        flat = values.flatten()
        if bool((flat == flat[0]).all()):
            noise = torch.rand(values.shape, generator=generator, dtype=torch.float64).to(values.device)
            return (noise + 0.5) * (flat[0] if flat[0] else 1.0)
        return flat[_order(len(flat), generator).to(values.device)].reshape(values.shape)

    for _ in range(2):
        new = _changed(inputs, draw)
        if new is not None:
            yield Varied(_shuffled(new, generator), "other values, drawn from those given")


def _order(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(count, generator=generator)


def _shuffled(inputs: KernelInputs, generator: torch.Generator) -> KernelInputs:
    """Return inputs whose integers are in another order, unless they are sorted."""
    leaves = list(inputs.leaves)
    for number, tensor in inputs.tensors():
        flat = tensor.flatten()
        if is_discrete(tensor) and len(flat) > 1 and not bool((flat.diff() >= 0).all()):
            leaves[number] = flat[_order(len(flat), generator).to(tensor.device)].reshape(tensor.shape)
    return inputs.having(leaves)


def _scaled(inputs: KernelInputs, magnitudes: Sequence[float], words: str) -> Iterator[Varied]:
    for magnitude in magnitudes:

        def scale(values: torch.Tensor, _: int, magnitude: float = magnitude) -> torch.Tensor | None:
            largest = float(values.abs().max())
            return values * 2.0 ** round(float(torch.tensor(magnitude / largest).log2())) if largest else None

        new = _changed(inputs, scale)
        if new is not None:
            yield Varied(new, f"{words} {magnitude:.3g}")


def _least_normal(inputs: KernelInputs) -> float:
    """Return the largest of the least normal numbers of the dtypes among the inputs."""
    floating = [tensor.dtype for _, tensor in inputs.tensors() if not meaning_of(tensor).fixed]
    return max((torch.finfo(dtype).tiny for dtype in floating), default=1.0)


def _large(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Overflow: an exponential without its maximum, a square."""
    small_range = _least_normal(inputs) > 1e-30
    yield from _scaled(inputs, (2.0**5, 2.0**7 if small_range else 2.0**10), "magnitudes up to")


def _tiny(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Constants that are added to small numbers: eps."""
    small_range = _least_normal(inputs) > 1e-30
    yield from _scaled(inputs, (2.0**-7,) if small_range else (2.0**-7, 2.0**-18), "magnitudes up to")


def _spikes(inputs: KernelInputs, generator: torch.Generator) -> Iterator[Varied]:
    """A few large elements among small ones: one that is lost is then everything."""

    def spike(values: torch.Tensor, number: int) -> torch.Tensor | None:
        largest = float(values.abs().max())
        if not largest or values.numel() < 2:
            return None
        made = values * 2.0**-5
        lines = made.reshape(-1, made.shape[-1])
        rows, columns = lines.shape
        places = [place for place in _BORDERS if place < columns - 1]
        places += [columns - 1, *torch.randint(columns, (4,), generator=generator).tolist()]
        each = min(-(-len(places) // rows), max(1, columns // 8))
        row = torch.arange(rows).repeat_interleave(each)
        place = torch.tensor(places)[(torch.arange(rows * each) + number) % len(places)]
        sign = torch.where(lines[row, place].real < 0, -1.0, 1.0)
        lines[row, place] = (sign * largest * 2.0).to(lines.dtype)
        return lines.reshape(values.shape)

    new = _changed(inputs, spike)
    if new is not None:
        yield Varied(new, "few elements 64 times as large as the others, at borders of blocks and elsewhere")


def _integers(inputs: KernelInputs, generator: torch.Generator) -> Iterator[Varied]:
    """Small integers, whose sums are exact in any order and dtype: an error is then no rounding."""

    def draw(values: torch.Tensor, _: int) -> torch.Tensor:
        drawn = torch.randint(-3, 4, values.shape, generator=generator).to(values.device, torch.float64)
        real = values.real if values.is_complex() else values
        if bool((real > 0).all()):
            drawn = drawn.abs().clamp_min(1)
        return drawn.to(values.dtype)

    new = _changed(inputs, draw)
    if new is not None:
        yield Varied(new, "integers from -3 to 3, whose sums are exact")


def _zeros(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Zeros, and lines of zeros beside others."""

    def clear(values: torch.Tensor, number: int, every: int) -> torch.Tensor | None:
        if not values.is_complex() and bool((values > 0).all()) and not _is_constant(values):
            return None
        made = values.clone()
        lines = made.reshape(-1, made.shape[-1]) if made.dim() > 1 else made.reshape(-1, 1)
        lines[number % every :: every] = 0
        return lines.reshape(values.shape)

    for every, words in ((1, "zeros"), (3, "every third line is zeros")):
        new = _changed(inputs, lambda values, number, every=every: clear(values, number, every))  # type: ignore[misc]
        if new is not None:
            yield Varied(new, words)


def _is_constant(values: torch.Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def _special(inputs: KernelInputs, value: float, words: str) -> Iterator[Varied]:
    """Put a value into few places of one input after the other."""
    numbers = [number for number, tensor in inputs.tensors() if not meaning_of(tensor).fixed]
    names = inputs.names()
    for number in numbers[:_SEPARATELY]:
        tensor = inputs.leaves[number]
        meaning = meaning_of(tensor)
        if meaning.ascending or (value < 0 and meaning.non_negative):
            continue
        made = tensor.clone(memory_format=torch.contiguous_format)
        lines = made.view(-1, made.shape[-1]) if made.dim() > 1 else made.view(1, -1)
        rows, columns = lines.shape
        for row, column in ((0, columns // 2), (rows // 2, 0), (rows - 1, columns - 1)):
            lines[row, column] = value
        leaves = list(inputs.leaves)
        leaves[number] = made
        yield Varied(inputs.having(leaves), f"{words} in {names[number]}")


def _nan(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """NaN at few places: none may be hidden, none may appear elsewhere."""
    yield from _special(inputs, float("nan"), "NaN")


def _inf(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Infinities of both signs at few places."""
    yield from _special(inputs, float("inf"), "infinities")
    yield from _special(inputs, float("-inf"), "negative infinities")


def finite_instead(inputs: KernelInputs, base: KernelInputs) -> Iterator[KernelInputs]:
    """Yield inputs with finite numbers where NaN or infinities were put: those of before, very large ones, and very
    large negative ones."""
    yield base
    for factor in (2.0**10, -(2.0**10)):
        leaves = list(inputs.leaves)
        for number, tensor in inputs.tensors():
            before = base.leaves[number]
            if tensor is not before and (tensor.is_floating_point() or tensor.is_complex()):
                largest = max(meaning_of(before).largest, 1.0)
                leaves[number] = torch.where(tensor.isfinite() | ~before.isfinite(), tensor, factor * largest)
        yield inputs.having(leaves)


def _denormals(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Numbers below the least normal one beside others."""

    def shrink(values: torch.Tensor, number: int) -> torch.Tensor | None:
        largest = float(values.abs().max())
        if not largest:
            return None
        flat = values.flatten().clone()
        flat[::3] *= torch.finfo(inputs.leaves[number].dtype).tiny / 2 / largest
        return flat.reshape(values.shape)

    new = _changed(inputs, shrink)
    if new is not None:
        yield Varied(new, "every third element is below the least normal number")


def flushed(inputs: KernelInputs) -> KernelInputs:
    """Return inputs whose numbers below the least normal one are zero."""
    leaves = list(inputs.leaves)
    for number, tensor in inputs.tensors():
        if tensor.is_floating_point() or tensor.is_complex():
            least = torch.finfo(tensor.dtype).tiny
            leaves[number] = torch.where(tensor.abs() < least, torch.zeros_like(tensor), tensor)
    return inputs.having(leaves)


def rounding_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that rounds its inputs twice before it computes: an exponential of large numbers as a power of
    two does so."""

    def round_twice(leaf: Any) -> Any:
        continuous = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return leaf * math.log2(math.e) * math.log(2) if continuous else leaf

    return lambda *args, **kwargs: function(*mapped(args, round_twice), **mapped(kwargs, round_twice))


# --------------------------------------------------------------------------------------------------- sizes and layout


def _sizes(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Sizes that are not multiples of blocks: each one near its own, one more than two of it, and 1; then all of them.

    The others are cut where the inputs are large.
    """
    free, large = free_sizes(inputs), _elements(inputs) > _SMALL

    def varied(sizes: dict[int, int], words: str) -> Iterator[Varied]:
        new, same = (resized(inputs, sizes, integers=integers) for integers in (True, False))
        numbers = [leaf for leaf in new.leaves if type(leaf) is int] != [n for n in same.leaves if type(n) is int]
        if any(size != to for size, to in sizes.items()) and _elements(new) <= _LARGEST:
            yield Varied(new, words, follows=(same,) if numbers else ())

    for size in free[:4]:
        others = {other: prime_below(min(other, 64)) if large and other > 8 else other for other in free}
        for to in (prime_below(size), 2 * size + 1, 1):
            yield from varied({**others, size: to}, f"{size} became {to}")
    if len(free) > 1:
        yield from varied({size: prime_below(min(size, REDUCED + 2)) for size in free}, "all sizes became primes")


def _elements(inputs: KernelInputs) -> int:
    return sum(tensor.numel() for _, tensor in inputs.tensors())


def _laid_out(inputs: KernelInputs, lay: Callable[[torch.Tensor], torch.Tensor | None], words: str) -> Iterator[Varied]:
    leaves, laid = list(inputs.leaves), False
    for number, tensor in inputs.tensors():
        if tensor.numel() < 2 or tensor.layout is not torch.strided:
            continue
        new = lay(tensor)
        if new is not None:
            leaves[number], laid = new, True
    if laid:
        yield Varied(inputs.having(leaves), words, layout=True)


def _strides(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Tensors whose elements do not lie one after the other."""

    def transposed(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2:
            return None
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    def with_gaps(tensor: torch.Tensor) -> torch.Tensor | None:
        between = tensor.roll(1, -1) if tensor.dim() else tensor
        if tensor.is_floating_point():
            between = between * -3 + 1
        return torch.stack([tensor, between], dim=-1).flatten(-2)[..., ::2]

    def with_padding(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dim() < 2:
            return None
        between = tensor.roll(1, -1)
        return torch.cat([tensor, between], dim=-1)[..., : tensor.shape[-1]]

    yield from _laid_out(inputs, transposed, "transposed in memory")
    yield from _laid_out(inputs, with_gaps, "every second element of a tensor")
    yield from _laid_out(inputs, with_padding, "the left half of a tensor")


def _offset(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Tensors that begin one element behind an aligned address."""

    def moved(tensor: torch.Tensor) -> torch.Tensor | None:
        room = torch.cat([tensor.flatten()[-1:], tensor.flatten()])
        return room[1:].view(tensor.shape)

    yield from _laid_out(inputs, moved, "begins one element behind an aligned address")


GIVEN, FLOAT32 = "given", "float32"

VARIATIONS = (
    Variation("seeds", _seeds, backward=True),
    Variation("sizes", _sizes, "no size can be varied", shapes=True, backward=True),
    Variation("strides", _strides, "no input has elements that can lie apart", shapes=True),
    Variation("offset", _offset, "no input has elements that can lie elsewhere", shapes=True),
    Variation("large", _large),
    Variation("tiny", _tiny),
    Variation("spikes", _spikes, backward=True),
    Variation("integers", _integers, backward=True),
    Variation("zeros", _zeros, "no input may be zero", backward=True),
    Variation("nan", _nan),
    Variation("inf", _inf),
    Variation("denormals", _denormals),
)

NAMES = (GIVEN, *(each.name for each in VARIATIONS), FLOAT32)
"""All that a verdict lists, in order."""
