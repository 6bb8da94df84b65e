"""Look up what the installed torch documents about an op under ``torch.use_deterministic_algorithms``.

Read from that function's own docstring, never from a copied list: two lists, of what becomes deterministic and of what
raises, whose items name public functions and modules (``torch.nn.Conv2d``) with conditions in prose. An ATen op is
matched to them by its name, without the parts that only say which library or which step computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.records import op_of

UNREADABLE = "torch's text could not be read"
NOT_LISTED = "not listed"

BECOMES_DETERMINISTIC, RAISES = "deterministic under the flag", "raises under the flag"
_VERDICTS = (("act deterministically", BECOMES_DETERMINISTIC), ("will throw", RAISES))
"""Words of the sentence above each list, and its verdict."""

_DEVICES = re.compile(r"\b(CPU|CUDA|MPS|XPU)\b")
_ROLE = re.compile(r":\w+:`~?([\w.]+)`")
_CONDITION = re.compile(r"(?<=`)\s+(?=[a-z])(?!and )")
_DIMENSIONS = re.compile(r"_?([123])d(?=_|$)")
_CAPITALS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_DECORATIONS = frozenset(
    [
        *("cudnn", "mkldnn", "miopen", "mps", "thnn", "slow", "depthwise", "overrideable", "unsafe", "cpu"),
        *("forward", "backward", "impl", "fallback", "with", "indices", "dense", "sparse", "aa"),
        *("per", "sample", "weights", "input", "weight", "bias", "data"),
    ]
)
"""Words in ATen names that only say which library computes, or which step or gradient."""

_PUBLIC_NAMES = {
    "convolution": ("conv", "conv_transpose"),
    "grid_sampler": ("grid_sample",),
    "index": ("getitem",),
    "upsample": ("interpolate",),
}
"""ATen names that differ from the public name; everything else follows by rule (``nn.NLLLoss`` is ``nll_loss``)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One bullet of torch's lists.

    Attributes:
        names: the public names that it is about.
        condition: in torch's words.
        modes: the bullets below it, if any.
    """

    verdict: str
    names: tuple[str, ...]
    condition: str
    modes: tuple[str, ...] = ()

    @property
    def differentiating(self) -> bool:
        """True if it is about the backward pass."""
        return "differentiate" in self.condition or "requires grad" in self.condition

    def speaks_of(self, device: str) -> bool:
        """Return True if it is about this type of device, or about none in particular."""
        devices = _DEVICES.findall(self.condition)
        return not devices or device.partition(":")[0].upper() in devices


@dataclass(frozen=True, slots=True)
class _OpName:
    """A name in parts: ``max_pool2d_with_indices_backward`` is stem ``max_pool``, 2 dimensions, backward."""

    stem: str
    dimensions: str = ""
    mode: str = ""
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Documentation:
    """torch's entries for an op.

    Attributes:
        here: the items that are about ``device``.
        elsewhere: the items that are about other devices alone.
        readable: False if torch's text could not be parsed, so that nothing is known.
    """

    device: str
    here: tuple[Item, ...] = ()
    elsewhere: tuple[Item, ...] = ()
    readable: bool = True

    @property
    def verdicts(self) -> frozenset[str]:
        """The lists that name it for this device: some of :data:`BECOMES_DETERMINISTIC` and :data:`RAISES`."""
        return frozenset(item.verdict for item in self.here)

    @property
    def text(self) -> str:
        """One line, for example ``raises under the flag: torch.Tensor.put_ when accumulate=False``, items separated by
        ``; ``; else :data:`NOT_LISTED`, with the entries for other devices in brackets."""
        if not self.readable:
            return UNREADABLE
        if self.here or not self.elsewhere:
            return _text(self.here) or NOT_LISTED
        return f"{NOT_LISTED} for {self.device} ({_text(self.elsewhere)})"


def look_up(op: str, *, device: str, backward_of: str = "") -> Documentation:
    """Return torch's documentation of an op under the flag.

    Args:
        op: an overload of an op, ``aten.index_put_.default``, or the id of a record of it.
        device: the type of the device that it ran on, ``cpu``.
        backward_of: the forward op that it helps to differentiate, in the same form; empty for any other op.
    """
    kind = device.partition(":")[0]
    items = parse(torch.use_deterministic_algorithms.__doc__ or "")
    matching = _matching(items, op, backward_of=backward_of)
    here = tuple(item for item in matching if item.speaks_of(kind))
    return Documentation(kind, here, tuple(item for item in matching if item not in here), readable=bool(items))


def deterministic_by_flag(ops: Iterable[str], *, device: str) -> tuple[str, ...]:
    """Return the ``ops`` that torch lists as deterministic on ``device`` under the flag, and so perhaps only there.

    A name is all that is known of a call: ``index_put`` without ``accumulate`` and with distinct indices needs no flag.
    """
    kind = device.partition(":")[0]
    items = [
        item
        for item in parse(torch.use_deterministic_algorithms.__doc__ or "")
        if item.verdict == BECOMES_DETERMINISTIC and item.speaks_of(kind)
    ]
    return tuple(op for op in sorted(ops) if _matching(items, op, backward_of=""))


def parse(docstring: str) -> tuple[Item, ...]:
    """Parse both lists of the docstring; return nothing if one of them is missing or cannot be parsed."""
    items = tuple(_item(verdict, bullet, modes) for verdict, bullet, modes in _bullets(docstring))
    complete = {item.verdict for item in items} == {verdict for _, verdict in _VERDICTS}
    return items if complete and all(item.names for item in items) else ()


def _bullets(docstring: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each bullet: the verdict of its list, its text on one line, and the bullets below it."""
    verdict = ""
    waiting: list[tuple[str, str, tuple[str, ...]]] = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        if text.startswith("* ") and verdict:
            yield from waiting
            bullets = re.split(r"^\s*\* ", paragraph, flags=re.MULTILINE)[1:]
            waiting = [(verdict, " ".join(bullet.split()), ()) for bullet in bullets]
        elif text.startswith("- ") and waiting:
            waiting[-1] = (*waiting[-1][:2], tuple(text.removeprefix("- ").split(" - ")))
        else:
            yield from waiting
            waiting = []
            verdict = next((name for words, name in _VERDICTS if words in text and text.endswith(":")), "")
    yield from waiting


def _item(verdict: str, bullet: str, modes: Sequence[str]) -> Item:
    head, *condition = _CONDITION.split(bullet, maxsplit=1)
    plain = _ROLE.sub(r"\1", "".join(condition)).replace("`", "").rstrip(":")
    return Item(verdict, tuple(_ROLE.findall(head)), plain, tuple(mode.strip("` ") for mode in modes))


def _matching(items: Iterable[Item], op: str, *, backward_of: str) -> list[Item]:
    own, differentiated = _aten_names(op), _aten_names(backward_of)
    return [
        item
        for item in items
        if any(_is_about(item, name, differentiating=name.backward) for name in own)
        or (item.differentiating and any(_is_about(item, name, differentiating=True) for name in differentiated))
    ]


def _is_about(item: Item, name: _OpName, *, differentiating: bool) -> bool:
    """Return True if an item is about an op. An entry for calling a function holds for its backward kernel too."""
    if item.differentiating and not differentiating:
        return False
    if item.modes and name.mode not in item.modes:
        return False
    return any(
        public.stem == name.stem and (not name.dimensions or public.dimensions in ("", name.dimensions))
        for public in map(_public_name, item.names)
    )


def _aten_names(op: str) -> tuple[_OpName, ...]:
    """Return the public names that an ATen op may go by; empty for other ops."""
    namespace, _, rest = op_of(op).partition(".")
    if namespace != "aten":
        return ()
    bare, dimensions = _without_dimensions(rest.partition(".")[0].strip("_"))
    backward = "backward" in bare.split("_")
    words = [word for word in bare.split("_") if word and word not in _DECORATIONS]
    if words[:1] == ["upsample"]:
        return (_OpName("interpolate", "", "_".join(words[1:]), backward),)
    if "transpose" in words and words[0] in ("conv", "convolution"):
        return (_OpName("conv_transpose", dimensions, "", backward),)
    stem = "_".join(words)
    return tuple(_OpName(name, dimensions, "", backward) for name in _PUBLIC_NAMES.get(stem, (stem,)))


def _public_name(name: str) -> _OpName:
    """Split a public name: ``torch.nn.AdaptiveAvgPool2d`` has the stem ``adaptive_avg_pool`` and 2 dimensions."""
    return _OpName(*_without_dimensions(_CAPITALS.sub("_", name.rpartition(".")[2]).lower().strip("_")))


def _without_dimensions(name: str) -> tuple[str, str]:
    """Split ``max_pool2d`` into ``max_pool`` and ``2``."""
    match = _DIMENSIONS.search(name)
    return _DIMENSIONS.sub("", name, count=1), match[1] if match else ""


def _text(items: Iterable[Item]) -> str:
    """Format the items; those of one list with one condition are named together."""
    names: dict[tuple[str, str], list[str]] = {}
    for item in items:
        shown = f"{item.condition}: {', '.join(item.modes)}" if item.modes else item.condition
        names.setdefault((item.verdict, shown), []).extend(item.names)
    return "; ".join(f"{verdict}: {', '.join(of)} {shown}".rstrip() for (verdict, shown), of in names.items())
