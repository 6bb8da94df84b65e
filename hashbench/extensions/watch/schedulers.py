"""Read the state of learning rate schedulers: of objects that hold a watched optimizer as ``optimizer``.

A scheduler that was not restored may act long after the resumption: its counters differ at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_LONGEST = 16
"""Longest list of plain values that is read."""

_MOST_LOOKS = 8

_PLAIN = (bool, int, float, str, type(None))


class WatchedSchedulers:
    """Schedulers of the watched optimizers, found among all objects of the process once they are stepped first."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Any]] = []
        self._last: dict[str, str] = {}
        self._looked = 0

    def look_up(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Find the schedulers of these optimizers. This walks all objects of the process, and a program may make an
        optimizer in each step: the first few times alone."""
        self._looked += 1
        if self._looked > _MOST_LOOKS:
            return
        found = sorted(schedulers_of(optimizers), key=lambda each: (type(each).__name__, sorted(_plain(each))))
        names = [type(scheduler).__name__ for scheduler in found]
        self._found = [
            (name if names.count(name) == 1 else f"{name} {names[:at].count(name) + 1}", each)
            for at, (name, each) in enumerate(zip(names, found, strict=True))
        ]

    def changes(self) -> dict[str, str]:
        """Return what changed since the last call, by scheduler and attribute (``StepLR.last_epoch``); at first all."""
        now = {f"{name}.{key}": text for name, scheduler in self._found for key, text in _plain(scheduler)}
        changed = {key: text for key, text in now.items() if self._last.get(key) != text}
        self._last = now
        return changed


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return the objects that step the learning rates of these optimizers, in no order.

    A scheduler may hold what wraps its optimizer: that of transformers' ``Trainer`` holds accelerate's wrapper.
    """
    if not optimizers:
        return []
    wrappers = [owner for owner in _owners(optimizers) if _wraps(owner, optimizers)]
    held = [*optimizers, *wrappers]
    return [owner for owner in _owners(held) if _is_scheduler(owner, held)]


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return the objects of the process that hold one of these, each once."""
    holders = gc.get_referrers(*optimizers)
    attributes = [
        holder for holder in holders if type(holder) is dict and any(holder.get("optimizer") is by for by in optimizers)
    ]
    owners = gc.get_referrers(*attributes) if attributes else []  # Python shows an object's dict, or the object
    return list({id(each): each for each in (*holders, *owners)}.values())


def _wraps(each: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    held = getattr(each, "__dict__", {}).get("optimizer") if issubclass(type(each), torch.optim.Optimizer) else None
    return any(held is by for by in optimizers)


def _is_scheduler(each: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return True for an object with an optimizer, a step and a state: also of classes that do not inherit torch's.

    By its class and its own attributes alone, for to ask a stranger for an attribute may run the program's code.
    """
    kind = type(each)
    if issubclass(kind, (torch.optim.Optimizer, torch.nn.Module, type)):
        return False
    if not all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        return False
    held = getattr(each, "__dict__", {}).get("optimizer")
    return any(held is by for by in optimizers)


def _plain(scheduler: Any) -> Iterator[tuple[str, str]]:
    """Yield the attributes that are plain values, as text.

    Not the private ones: ``_step_count`` serves warnings, and is another one where a scheduler is made anew with
    ``last_epoch=``, as a resumed program rightly may.
    """
    for name, value in list(vars(scheduler).items()):
        if name.startswith("_") or name == "optimizer":
            continue
        if type(value) in (list, tuple):
            if len(value) <= _LONGEST and all(isinstance(each, _PLAIN) for each in value):
                yield name, f"({', '.join(map(_text, value))})"
        elif isinstance(value, _PLAIN):
            yield name, _text(value)


def _text(value: Any) -> str:
    """Return a plain value as text: of a subclass, as of NumPy, as the number that it is."""
    if isinstance(value, float):
        return repr(float(value))
    return repr(int(value)) if type(value) is not bool and isinstance(value, int) else str(value)
