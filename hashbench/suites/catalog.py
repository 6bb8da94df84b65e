"""The suites that come with hashbench: which there are, which package each needs, and what their names stand for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hashbench.errors import HashbenchError

ALL = "all"
"""In place of a suite: all bundled ones that can be swept here."""

TINY = "_tiny"
"""The small variant of a suite ends so: its own CSV, the same names, the same module."""


@dataclass(frozen=True, slots=True)
class Package:
    """``module`` must be importable; ``install`` says how it comes to be."""

    module: str
    install: str


NEEDED: Mapping[str, Package] = MappingProxyType(
    {
        "timm": Package("timm", "pip install 'hashbench[timm]'"),
        "huggingface": Package("transformers", "pip install 'hashbench[huggingface]'"),
        "torchbench": Package(
            "torchbenchmark", "git clone https://github.com/pytorch/benchmark, and put that folder on PYTHONPATH"
        ),
    }
)
"""By suite; what is not here needs nothing that hashbench does not."""

NOT_AMONG_ALL: Mapping[str, str] = MappingProxyType({"specimens": "its models differ on purpose"})
"""Suites that ``all`` leaves out, with the reason."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """``suites``: what the names on a command line stand for. ``notes``: what was left out or changed and
    why, one sentence each."""

    suites: tuple[str, ...]
    notes: tuple[str, ...] = ()


def module_name(suite: str) -> str:
    """The suite whose module builds the models: a small variant has none of its own."""
    return suite.removesuffix(TINY)


def how_to_install(suite: str) -> str:
    """What to do so that a suite can be swept; empty where it can."""
    package = NEEDED.get(module_name(suite))
    return "" if package is None or _importable(package.module) else package.install


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


def choose(names: Sequence[str], *, known: Sequence[str], tiny: bool = False) -> Chosen:
    """What ``names`` stand for: ``all`` is spelled out, and with ``tiny`` each suite that has a small variant is that.

    Args:
        names: of suites, or paths of zoo files, which stand for themselves.
        known: the names of all bundled suites.
        tiny: whether small variants are taken.
    """
    chosen: list[str] = []
    notes: list[str] = []
    for name in names:
        found = _all(known) if name == ALL else Chosen((name,))
        chosen += found.suites
        notes += found.notes
    if tiny:
        small = {name: _small(name, known) for name in chosen}
        notes += [f"{name} has no small variant: its models have their full size" for name in chosen if not small[name]]
        chosen = [small[name] or name for name in chosen]
    return Chosen(tuple(chosen), tuple(dict.fromkeys(notes)))


def _small(name: str, known: Sequence[str]) -> str:
    """The small variant of a suite, which may be one already; empty where there is none."""
    if name.endswith(TINY):
        return name
    return name + TINY if name + TINY in known else ""


def _all(known: Sequence[str]) -> Chosen:
    suites = [name for name in known if not name.endswith(TINY)]
    reasons = {name: _why_not_among_all(name) for name in suites}
    return Chosen(
        tuple(name for name in suites if not reasons[name]),
        tuple(f"{name} is left out: {reason}" for name, reason in reasons.items() if reason),
    )


def _why_not_among_all(suite: str) -> str:
    install = how_to_install(suite)
    return NOT_AMONG_ALL.get(suite, "") or (f"not installed: {install}" if install else "")


def require(suites: Sequence[str]) -> None:
    """Refuse suites whose package is not installed.

    Raises:
        HashbenchError: with what to do.
    """
    for suite in suites:
        install = how_to_install(suite)
        if install:
            package = NEEDED[module_name(suite)].module
            raise HashbenchError(
                f"cannot sweep {suite}",
                consequence=f"the package {package} is not installed",
                tip=f"Install it: {install}",
            )
