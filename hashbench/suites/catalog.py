"""The suites that come with hashbench, one entry each, and what their names stand for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec
from hashbench.suites import csv_file, zoo_file

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

ALL = "all"
"""In place of a suite: all bundled ones that can be swept here."""

TINY = "_tiny"
"""The small variant of a suite ends so: its own CSV, the same names, the same module."""


class Suite(Protocol):
    """Where models come from. Listing them imports no torch, and code of users only in a child process."""

    @property
    def name(self) -> str:
        """What the rows of its models have as their suite."""

    def catalog(self) -> tuple[ModelSpec, ...]:
        """All models, sorted by name.

        Raises:
            HashbenchError: the suite cannot be read.
        """

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:
        """One model of the catalog, its inputs and its loss, drawn from torch's global generator.

        Raises:
            HashbenchError: it offers no such model, or not in this form.
            Exception: whatever building the model raises.
        """


@dataclass(frozen=True, slots=True)
class Package:
    """``module`` must be importable; ``install`` says how it comes to be."""

    module: str
    install: str


@dataclass(frozen=True, slots=True)
class BundledSuite:
    """A suite whose models are the lines of ``models/<name>.csv``.

    They are built by the Python files in the folder ``models/<name>`` where there is one, else by the function ``load``
    of ``hashbench.suites.<builder>``.

    Attributes:
        name: of the suite and its CSV.
        package: what must be installed to sweep it; ``None``: nothing that hashbench does not need.
        variants: endings of the names of further CSVs with the same models, built by the same module.
        apart: why ``all`` leaves it out; empty where it does not.
        lists_itself: the ``catalog`` of its module says which models there are, where its package is installed.
        variant_of: the suite that this is a variant of; empty for a suite of its own.
    """

    name: str
    package: Package | None = None
    variants: tuple[str, ...] = ()
    apart: str = ""
    lists_itself: bool = False
    variant_of: str = ""

    def with_variants(self) -> tuple[BundledSuite, ...]:
        """This suite and its variants."""
        others = (replace(self, name=self.name + ending, variant_of=self.name) for ending in self.variants)
        return (self, *others)

    @property
    def builder(self) -> str:
        """The name of the module that builds the models: a variant has none of its own."""
        return self.variant_of or self.name

    @property
    def how_to_install(self) -> str:
        """What to do so that it can be swept; empty where it can."""
        return "" if self.package is None or _importable(self.package.module) else self.package.install

    @property
    def files(self) -> list[Path]:
        """The Python files that build the models; none where a module of this package does."""
        return sorted((csv_file.data_folder() / self.name).glob("[!_]*.py"))

    def catalog(self) -> tuple[ModelSpec, ...]:
        """See :class:`Suite`."""
        known = csv_file.read_suite(csv_file.data_folder() / f"{self.name}.csv", suite=self.name)
        if not self.lists_itself or self.how_to_install:
            return known
        listed: tuple[ModelSpec, ...] = importlib.import_module(f"hashbench.suites.{self.builder}").catalog(known)
        return listed

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:
        """See :class:`Suite`."""
        if files := self.files:
            return zoo_file.build(files, spec.name, batch_size=batch_size)
        if batch_size is None or batch_size < 1:
            raise HashbenchError(
                f"cannot run {spec.name} with batch size {batch_size}", tip="Give --batch-size 1 or more."
            )
        module = importlib.import_module(f"hashbench.suites.{self.builder}")
        workload: Workload = module.load(spec, batch_size=batch_size, mode=mode)
        return workload


_SUITES = (
    BundledSuite("huggingface", Package("transformers", "pip install 'hashbench[huggingface]'"), variants=(TINY,)),
    BundledSuite("specimens", apart="its models differ on purpose"),
    BundledSuite("timm", Package("timm", "pip install 'hashbench[timm]'")),
    BundledSuite(
        "torchbench",
        Package("torchbenchmark", "git clone https://github.com/pytorch/benchmark, and put that folder on PYTHONPATH"),
        lists_itself=True,
    ),
    BundledSuite("torchvision"),
)
"""A new bundled suite is one entry here, its CSV, and a module ``hashbench/suites/<name>.py`` with ``load``."""

BUNDLED: Mapping[str, BundledSuite] = MappingProxyType(
    {suite.name: suite for entry in _SUITES for suite in entry.with_variants()}
)
"""Every bundled suite by its name, the variants too."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """``suites``: what the names on a command line stand for. ``notes``: what was left out or changed and
    why, one sentence each."""

    suites: tuple[str, ...]
    notes: tuple[str, ...] = ()


def how_to_install(suite: str) -> str:
    """What to do so that a suite can be swept; empty where it can."""
    return BUNDLED[suite].how_to_install if suite in BUNDLED else ""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


def choose(names: Sequence[str], *, tiny: bool = False) -> Chosen:
    """What ``names`` stand for: ``all`` is spelled out, and with ``tiny`` each suite that has a small variant is that.

    Args:
        names: of suites, or paths of zoo files, which stand for themselves.
        tiny: whether small variants are taken.
    """
    chosen: list[str] = []
    notes: list[str] = []
    for name in names:
        meant = _all() if name == ALL else Chosen((name,))
        chosen += meant.suites
        notes += meant.notes
    if tiny:
        small = {name: _small(name) for name in chosen}
        notes += [f"{name} has no small variant: its models have their full size" for name in chosen if not small[name]]
        chosen = [small[name] or name for name in chosen]
    return Chosen(tuple(chosen), tuple(dict.fromkeys(notes)))


def _small(name: str) -> str:
    """The small variant of a suite, which may be one already; empty where there is none."""
    if name.endswith(TINY):
        return name
    return name + TINY if name + TINY in BUNDLED else ""


def _all() -> Chosen:
    suites = [suite for suite in BUNDLED.values() if not suite.variant_of]
    reasons = {suite.name: _why_not_among_all(suite) for suite in suites}
    return Chosen(
        tuple(name for name, reason in reasons.items() if not reason),
        tuple(f"{name} is left out: {reason}" for name, reason in reasons.items() if reason),
    )


def _why_not_among_all(suite: BundledSuite) -> str:
    install = suite.how_to_install
    return suite.apart or (f"not installed: {install}" if install else "")


def require(suites: Sequence[str]) -> None:
    """Refuse suites whose package is not installed.

    Raises:
        HashbenchError: with what to do.
    """
    for suite in (BUNDLED[name] for name in suites if name in BUNDLED):
        if suite.package is not None and suite.how_to_install:
            raise HashbenchError(
                f"cannot sweep {suite.name}",
                consequence=f"the package {suite.package.module} is not installed",
                tip=f"Install it: {suite.how_to_install}",
            )
