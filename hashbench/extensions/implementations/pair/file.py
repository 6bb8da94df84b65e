"""The two sides that a user's Python file defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hashbench.core.suites.user_file import UserFile, takes_an_argument
from hashbench.extensions.implementations.pair.check import Side

EXAMPLE = "make_a() and make_b(), and inputs() or inputs_a() and inputs_b()"

SIDES = ("a", "b")


def is_pair(file: UserFile) -> bool:
    """Return whether a file defines ``make_a`` or ``make_b``."""
    return any(f"make_{side}" in file.names for side in SIDES)


def load_sides(file: UserFile, *, training: bool | None) -> tuple[Side, Side]:
    """Return the sides of a file with ``make_a``, ``make_b`` and ``inputs``, or with ``before``, ``after`` and it.

    Optional are ``outputs`` and ``loss``; each of ``inputs``, ``outputs`` and ``loss`` may be one function for both
    sides, or one for each, such as ``inputs_a``. ``RANKS_A`` and ``RANKS_B`` are numbers of processes that run a side
    together. Nothing but the file is run here.

    Args:
        file: what the user wrote.
        training: run modules in ``train()`` mode, and compare gradients; ``False``: in ``eval()`` mode, without
            gradients; ``None``: in their own mode, with gradients where the file has a loss.

    Raises:
        HashbenchError: the file lacks a function.
    """
    pair = is_pair(file)
    file = replace(file, example=EXAMPLE) if pair else file
    makers = _makers_of_pair(file) if pair else _makers_of_transformation(file)
    sides = [
        Side(
            make=_in_mode(make, training),
            inputs=_inputs(file, side),
            outputs=_picks(file, "outputs", side),
            loss=None if training is False else _picks(file, "loss", side),
            ranks=_ranks(file, side),
            again=(f"{__name__}:read_side", (str(file.path.absolute()), side, training)),
        )
        for side, make in zip(SIDES, makers, strict=True)
    ]
    if training and any(side.loss is None for side in sides):
        raise file.unusable(
            "it has no loss(result), so there are no gradients for --training to compare",
            "Add a function loss(result) that returns a scalar, or loss_a and loss_b.",
        )
    return sides[0], sides[1]


def read_side(path: str, side: str, training: bool | None) -> Side:
    """Read one side of a file in another process."""
    sides = load_sides(UserFile.read(Path(path), example=EXAMPLE), training=training)
    return sides[SIDES.index(side)]


def _ranks(file: UserFile, side: str) -> int:
    name = f"RANKS_{side.upper()}"
    ranks = file.names.get(name, 1)
    if type(ranks) is not int or ranks < 1:
        raise file.unusable(f"its {name} is {ranks!r}", f"Write a number of processes, such as {name} = 2.")
    return ranks


def _makers_of_pair(file: UserFile) -> list[Callable[[], Any]]:
    return [_maker(file, f"make_{side}") for side in SIDES]


def _makers_of_transformation(file: UserFile) -> list[Callable[[], Any]]:
    before, after = _maker(file, "before"), file.function("after")
    if not takes_an_argument(after):
        return [before, _maker(file, "after")]
    return [before, lambda: file.model("after", after, before())]


def _maker(file: UserFile, name: str) -> Callable[[], Any]:
    make = file.function(name)
    return lambda: file.model(name, make)


def _in_mode(make: Callable[[], Any], training: bool | None) -> Callable[[], Any]:
    """Return a maker whose modules are in ``train()`` or ``eval()`` mode, unless ``training`` is ``None``."""
    if training is None:
        return make

    def made() -> Any:
        model = make()
        set_mode = getattr(model, "train", None)
        return set_mode(training) if set_mode is not None else model

    return made


def _inputs(file: UserFile, side: str) -> Callable[[], Any]:
    name = _name(file, "inputs", side)
    function = file.function(name)
    return lambda: file.inputs(name, function)


def _picks(file: UserFile, what: str, side: str) -> Callable[[Any], Any] | None:
    name = _name(file, what, side)
    if file.names.get(name) is None:
        return None
    function = file.function(name)
    return lambda result: file.called(name, function, result)


def _name(file: UserFile, what: str, side: str) -> str:
    own = f"{what}_{side}"
    return own if file.names.get(own) is not None else what
