"""Suites: where models come from, and what their names stand for.

* A bundled suite is an entry of the table here and a CSV in the data folder. Its models are built by the Python files
  in the folder of the same name beside the CSV where there is one (``specimens``), else by the function ``load`` of the
  module of that name here (``torchvision``). ``<suite>_tiny`` is its small variant, built by the same function.
* A package's suite is an entry point, a user's the path of a Python file (:mod:`hashbench.core.suites.python_suites`).

Nothing here imports torch before :func:`load`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_file
from hashbench.core.records import MODES, ModelSpec
from hashbench.core.suites import csv_file
from hashbench.core.suites.python_suites import FileSuite, PackageSuite, build_from, package_suites
from hashbench.core.suites.selection import unknown_name

if TYPE_CHECKING:
    from hashbench.core.run.workload import Workload

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
        """List all models, sorted by name.

        Raises:
            HashbenchError: the suite cannot be read.
        """

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:
        """Build one model of the catalog, its inputs and its loss, drawn from torch's global generator.

        Raises:
            HashbenchError: it offers no such model, or not in this form.
            Exception: whatever building the model raises.
        """


@dataclass(frozen=True, slots=True)
class BundledSuite:
    """A suite whose models are the lines of ``models/<name>.csv``.

    Attributes:
        name: of the suite and its CSV.
        package: the module that must be importable to sweep it; empty: none but torch.
        install: how that comes to be.
        variants: endings of the names of further CSVs with the same models, built by the same function.
        apart: why ``all`` leaves it out; empty where it does not.
        builder: the function that builds a model, as ``module:function``; by default ``load`` of the suite's module.
        lister: the function that tells which models there are, from those of the CSV, where its package is installed.
        variant_of: the suite that this is a variant of; empty for a suite of its own.
    """

    name: str
    package: str = ""
    install: str = ""
    variants: tuple[str, ...] = ()
    apart: str = ""
    builder: str = ""
    lister: str = ""
    variant_of: str = ""

    def with_variants(self) -> tuple[BundledSuite, ...]:
        """Return this suite and its variants."""
        others = (replace(self, name=self.name + ending, variant_of=self.name) for ending in self.variants)
        return (self, *others)

    @property
    def how_to_install(self) -> str:
        """What to do so that it can be swept; empty where it can."""
        return self.install if self.package and not _importable(self.package) else ""

    @property
    def files(self) -> list[Path]:
        """The Python files that build the models; none where a module of this package does."""
        return sorted((csv_file.data_folder() / self.name).glob("[!_]*.py"))

    def catalog(self) -> tuple[ModelSpec, ...]:
        """See :class:`Suite`."""
        known = csv_file.read_suite(csv_file.data_folder() / f"{self.name}.csv", suite=self.name)
        if not self.lister or self.how_to_install:
            return known
        listed: tuple[ModelSpec, ...] = resolve_name(self.lister)(known)
        return listed

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:
        """See :class:`Suite`."""
        if files := self.files:
            return build_from(files, spec.name, batch_size=batch_size)
        if batch_size is None or batch_size < 1:
            problem = f"cannot run {spec.name} with batch size {batch_size}"
            raise HashbenchError(problem, tip="Give --batch-size 1 or more.")
        build = resolve_name(self.builder or f"hashbench.core.suites.{self.variant_of or self.name}:load")
        workload: Workload = build(spec, batch_size=batch_size, mode=mode)
        return workload


_SUITES = (
    BundledSuite("huggingface", "transformers", "pip install 'hashbench[huggingface]'", variants=(TINY,)),
    BundledSuite("specimens", apart="its models differ on purpose"),
    BundledSuite("compiled", apart="its models are compiled wrongly on purpose"),
    BundledSuite("timm", "timm", "pip install 'hashbench[timm]'", builder="hashbench.core.suites.model_zoos:load_timm"),
    BundledSuite(
        "torchbench",
        "torchbenchmark",
        "git clone https://github.com/pytorch/benchmark, and put that folder on PYTHONPATH",
        builder="hashbench.core.suites.model_zoos:load_torchbench",
        lister="hashbench.core.suites.model_zoos:torchbench_models",
    ),
    BundledSuite("torchvision", "torchvision", "pip install the torchvision of this torch"),
)
"""A new bundled suite is one entry here, its CSV, and a module ``hashbench/core/suites/<name>.py`` with ``load``."""

BUNDLED: Mapping[str, BundledSuite] = MappingProxyType(
    {suite.name: suite for entry in _SUITES for suite in entry.with_variants()}
)
"""Every bundled suite by its name, the variants too."""

SUITES: tuple[str, ...] = tuple(BUNDLED)
"""Names of the bundled suites."""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


# ----------------------------------------------------------------------------------------- suites and their models


def names() -> tuple[str, ...]:
    """List the names of all suites, bundled ones first, then those of packages; small variants are left out."""
    return (*(suite.name for suite in BUNDLED.values() if not suite.variant_of), *package_suites())


def find(suite: str) -> Suite:
    """Return the suite of a name, or of the path of a Python file.

    Raises:
        HashbenchError: there is no such suite, or two have this name.
    """
    if suite in BUNDLED:
        if suite in package_suites():
            raise HashbenchError(
                f"an installed package provides a suite {suite!r}",
                consequence="hashbench has one of that name",
                tip="Rename the package's entry point, or uninstall it.",
            )
        return BUNDLED[suite]
    if _is_file(suite):
        name = Path(suite).stem
        if name in (ALL, *BUNDLED, *package_suites()):
            raise HashbenchError(
                f"the zoo file {suite} has the name of the suite {name!r}",
                consequence="rows are distinguished by it, so nothing was run",
                tip="Rename the file.",
            )
        return FileSuite(Path(suite).absolute())
    if suite in package_suites():
        return PackageSuite(suite)
    tip = f"Choose one of {', '.join(names())}, or give the path of a Python file."
    raise unknown_name("suite", suite, [*BUNDLED, *names(), ALL], tip=tip)


def catalog(suite: str) -> tuple[ModelSpec, ...]:
    """List all models of a suite, sorted by name; zoo files and packages are imported in a child process.

    Raises:
        HashbenchError: there is no such suite, two have this name, or it is wrong.
    """
    if _listed is None:
        return find(suite).catalog()
    key = (suite, *digests([suite]).values())
    if key not in _listed:
        _listed[key] = find(suite).catalog()
    return _listed[key]


_listed: dict[tuple[str, ...], tuple[ModelSpec, ...]] | None = None
"""The catalogs of this process in :func:`listed_once`, by suite and digest."""


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """Cache what :func:`catalog` returns until the end of the context, or until the file of a suite changes. Listing a
    zoo file imports torch in a child process, which takes seconds."""
    global _listed
    if _listed is not None:
        yield
        return
    _listed = {}
    try:
        yield
    finally:
        _listed = None


def digests(suites: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 (hexadecimal) of the files that each suite is read from, by the name that its rows have: of a
    zoo file itself, of a bundled suite its CSV and the files that build its models. A package's suite has none: it is
    known by the package's version. What such a file imports does not count.

    Raises:
        HashbenchError: there is no such suite, or no such zoo file.
    """
    found = {}
    for word in suites:
        suite = find(word)
        if isinstance(suite, FileSuite):
            suite.refuse_missing()
            files = [suite.path]
        elif isinstance(suite, BundledSuite):
            files = [csv_file.data_folder() / f"{suite.name}.csv", *suite.files]
        else:
            continue
        digest = hashlib.sha256()
        for file in files:
            with contextlib.suppress(OSError):  # listing its models says so
                digest.update(hashlib.sha256(read_file(file)).digest())
        found[suite.name] = digest.hexdigest()
    return found


def load(spec: ModelSpec, *, batch_size: int | None = None, mode: str) -> Workload:
    """Build one model, its inputs and its loss. Random values come from torch's global generator.

    Args:
        spec: from :func:`catalog`.
        batch_size: in place of the spec's own. A function that takes none makes its own inputs.
        mode: ``training`` or ``inference``.

    Raises:
        HashbenchError: ``mode`` or ``batch_size`` does not apply, or the model's function returned something else.
        Exception: whatever building the model raises.
    """
    if mode not in MODES:
        raise HashbenchError(f"unknown mode {mode!r}", tip=f"Choose one of {', '.join(MODES)}.")
    suite: Suite = BUNDLED[spec.suite] if spec.suite in BUNDLED else PackageSuite(spec.suite)
    if spec.source:
        suite = FileSuite(Path(spec.source))
    own_inputs = not isinstance(suite, BundledSuite) or suite.files
    if spec.batch_size is None and batch_size is not None and own_inputs:
        raise HashbenchError(
            f"--batch-size {batch_size} does not apply to {spec.name}",
            consequence="its own function makes its inputs",
            tip="Leave the flag out, or change the function.",
        )
    return suite.load(spec, batch_size=spec.batch_size if batch_size is None else batch_size, mode=mode)


def is_imported(suite: str) -> bool:
    """Return True if listing the suite imports code of users or packages, in a child process."""
    return suite not in BUNDLED


def _is_file(suite: str) -> bool:
    if suite.endswith(".py") or len(Path(suite).parts) > 1:
        return True
    return suite not in (ALL, *BUNDLED, *package_suites()) and Path(suite).is_file()


# ------------------------------------------------------------------------------------------- names on a command line


@dataclass(frozen=True, slots=True)
class Chosen:
    """``suites``: what the names on a command line stand for. ``notes``: what was left out or changed and
    why, one sentence each."""

    suites: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose(wanted: Sequence[str], *, tiny: bool = False) -> Chosen:
    """Expand the suite names of a command line: ``all`` stands for the bundled suites whose packages are installed,
    paths of zoo files are kept. With ``tiny``, each suite is replaced by its small variant if it has one.

    Raises:
        HashbenchError: two zoo files have one name.
    """
    left_out = {}
    for suite in BUNDLED.values():
        if not suite.variant_of:
            install = suite.how_to_install
            left_out[suite.name] = suite.apart or (f"not installed: {install}" if install else "")
    swept = [name for name, reason in left_out.items() if not reason]
    chosen = [name for word in wanted for name in (swept if word == ALL else [word])]
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items() if reason] if ALL in wanted else []
    if tiny:
        small = {name: name if name.endswith(TINY) else name + TINY for name in chosen}
        full = [name for name in chosen if small[name] != name and small[name] not in BUNDLED]
        notes += [f"{name} has no small variant: its models have their full size" for name in dict.fromkeys(full)]
        chosen = [name if name in full else small[name] for name in chosen]
    first: dict[str, Path] = {}
    for path in [Path(suite).absolute() for suite in chosen if _is_file(suite)]:
        if first.setdefault(path.stem, path) != path:
            raise HashbenchError(
                f"{first[path.stem]} and {path} have one name",
                consequence="rows are distinguished by it, so nothing was run",
                tip="Rename one of the files, or sweep them separately.",
            )
    return Chosen(tuple(chosen), tuple(notes))


def how_to_install(suite: str) -> str:
    """Return how to install what a suite lacks; empty if nothing."""
    return BUNDLED[suite].how_to_install if suite in BUNDLED else ""


def require(suites: Sequence[str]) -> None:
    """Refuse suites whose package is not installed.

    Raises:
        HashbenchError: with what to do.
    """
    for name in suites:
        if install := how_to_install(name):
            raise HashbenchError(
                f"cannot sweep {name}",
                consequence=f"the package {BUNDLED[name].package} is not installed",
                tip=f"Install it: {install}",
            )
