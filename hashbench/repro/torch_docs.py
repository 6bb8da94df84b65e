"""What the installed torch documents about an op under ``torch.use_deterministic_algorithms``.

Read from that function's own docstring, never from a copied list: two lists, of what becomes deterministic and of what
raises, whose items name public functions and modules (``torch.nn.Conv2d``) with conditions in prose. An ATen op is
matched to them by its name, without the parts of the name that only say which library or which step computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hashbench.records import op_of

UNREADABLE = "torch's text could not be read"
NOT_LISTED = "not listed"

BECOMES_DETERMINISTIC, RAISES = "deterministic under the flag", "raises under the flag"
_VERDICTS = (("act deterministically", BECOMES_DETERMINISTIC), ("will throw", RAISES))
"""Words of the sentence above each list, and how what it lists is called here."""

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
"""Words in the name of an ATen op that say which library computes, or which step or which gradient."""

_PUBLIC_NAMES = {
    "convolution": ("conv", "conv_transpose"),
    "grid_sampler": ("grid_sample",),
    "index": ("getitem",),
    "upsample": ("interpolate",),
}
"""Where ATen's name for something is not the public one; everything else follows by rule (``nn.NLLLoss`` is
``nll_loss``)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One bullet: the public ``names`` it is about, its ``condition`` in torch's words, and the ``modes`` that it lists
    below itself, if any."""

    verdict: str
    names: tuple[str, ...]
    condition: str
    modes: tuple[str, ...] = ()

    @property
    def differentiating(self) -> bool:
        """Whether it speaks of the backward pass."""
        return "differentiate" in self.condition or "requires grad" in self.condition

    def speaks_of(self, device: str) -> bool:
        """Whether it speaks of this type of device, or of none in particular."""
        devices = _DEVICES.findall(self.condition)
        return not devices or device.partition(":")[0].upper() in devices


@dataclass(frozen=True, slots=True)
class _Name:
    """What remains of a name: ``max_pool2d_with_indices_backward`` is the stem ``max_pool``, 2 dimensions, backward."""

    stem: str
    dimensions: str = ""
    mode: str = ""
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Documentation:
    """What torch lists about an op: the items ``here``, which speak of ``device``, and those ``elsewhere``, which speak
    of other devices alone. Not ``readable``: torch's text makes no sense, so nothing is known."""

    device: str
    here: tuple[Item, ...] = ()
    elsewhere: tuple[Item, ...] = ()
    readable: bool = True

    @property
    def verdicts(self) -> frozenset[str]:
        """Which lists name it for this device: some of :data:`BECOMES_DETERMINISTIC` and :data:`RAISES`."""
        return frozenset(item.verdict for item in self.here)

    @property
    def text(self) -> str:
        """On one line, for example ``raises under the flag: torch.Tensor.put_ when accumulate=False``; several items
        are separated by ``; ``. :data:`NOT_LISTED` where there is none, with what is listed for other devices in
        brackets."""
        if not self.readable:
            return UNREADABLE
        if self.here or not self.elsewhere:
            return _text(self.here) or NOT_LISTED
        return f"{NOT_LISTED} for {self.device} ({_text(self.elsewhere)})"


def look_up(op: str, *, device: str, backward_of: str = "") -> Documentation:
    """What torch's documentation says of an op.

    Args:
        op: an overload of an op, ``aten.index_put_.default``; the id of a record of it does as well.
        device: the type of the device that it ran on, ``cpu``.
        backward_of: the op that it helps to differentiate, in the same form; empty for any other op.
    """
    kind = device.partition(":")[0]
    items = parse(torch.use_deterministic_algorithms.__doc__ or "")
    matching = _matching(items, op, backward_of=backward_of)
    here = tuple(item for item in matching if item.speaks_of(kind))
    return Documentation(kind, here, tuple(item for item in matching if item not in here), readable=bool(items))


def parse(docstring: str) -> tuple[Item, ...]:
    """The items of both lists of the docstring; none at all where one of the lists is not found or makes no sense."""
    items = tuple(_item(verdict, bullet, modes) for verdict, bullet, modes in _bullets(docstring))
    complete = {item.verdict for item in items} == {verdict for _, verdict in _VERDICTS}
    return items if complete and all(item.names for item in items) else ()


def _bullets(docstring: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each bullet of the lists: the verdict of its list, its text on one line, and the bullets below itself."""
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


def _is_about(item: Item, name: _Name, *, differentiating: bool) -> bool:
    """Whether an item is about an op. What torch says of calling a function holds for its backward kernel too."""
    if item.differentiating and not differentiating:
        return False
    if item.modes and name.mode not in item.modes:
        return False
    return any(
        public.stem == name.stem and (not name.dimensions or public.dimensions in ("", name.dimensions))
        for public in map(_public_name, item.names)
    )


def _aten_names(op: str) -> tuple[_Name, ...]:
    """The public names that an op may go by; none for an op that is not ATen's."""
    namespace, _, rest = op_of(op).partition(".")
    if namespace != "aten":
        return ()
    bare, dimensions = _without_dimensions(rest.partition(".")[0].strip("_"))
    backward = "backward" in bare.split("_")
    words = [word for word in bare.split("_") if word and word not in _DECORATIONS]
    if words[:1] == ["upsample"]:
        return (_Name("interpolate", "", "_".join(words[1:]), backward),)
    if "transpose" in words and words[0] in ("conv", "convolution"):
        return (_Name("conv_transpose", dimensions, "", backward),)
    stem = "_".join(words)
    return tuple(_Name(name, dimensions, "", backward) for name in _PUBLIC_NAMES.get(stem, (stem,)))


def _public_name(name: str) -> _Name:
    """``torch.nn.AdaptiveAvgPool2d`` is the stem ``adaptive_avg_pool`` with 2 dimensions."""
    return _Name(*_without_dimensions(_CAPITALS.sub("_", name.rpartition(".")[2]).lower().strip("_")))


def _without_dimensions(name: str) -> tuple[str, str]:
    """``max_pool2d`` is ``max_pool`` and ``2``."""
    match = _DIMENSIONS.search(name)
    return _DIMENSIONS.sub("", name, count=1), match[1] if match else ""


def _text(items: Iterable[Item]) -> str:
    """The items; those of one list with one condition are named together."""
    names: dict[tuple[str, str], list[str]] = {}
    for item in items:
        shown = f"{item.condition}: {', '.join(item.modes)}" if item.modes else item.condition
        names.setdefault((item.verdict, shown), []).extend(item.names)
    return "; ".join(f"{verdict}: {', '.join(of)} {shown}".rstrip() for (verdict, shown), of in names.items())
