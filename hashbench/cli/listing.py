"""``hashbench list``, and what the words after ``--suite`` stand for."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
from collections.abc import Sequence

from tabulate import tabulate

from hashbench.cli.flags import Commands, say
from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec
from hashbench.results.rows import defuse
from hashbench.text import one_line

FORMATS = ("table", "csv", "json")

COLUMNS = ("suite", "name", "task", "parameters", "batch size", "input", "default", "notes")

_FIELDS = tuple(field.name for field in dataclasses.fields(ModelSpec))


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    listing = commands.add_parser("list", help="the models of a suite")
    add_suites(listing, default=[], otherwise="all that there are")
    listing.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    listing.set_defaults(command=_list)


def add_suites(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, default: list[str], otherwise: str
) -> None:
    """The flags that say which suites: ``--suite`` and ``--tiny``."""
    text = f"suites, all, or Python files of yours (default: {otherwise})"
    parser.add_argument("--suite", nargs="+", default=default, metavar="S", help=text)
    parser.add_argument("--tiny", action="store_true", help="the small variant of each suite that has one")


def suites_to_sweep(parsed: argparse.Namespace) -> tuple[str, ...]:
    """The suites that a command line asks for; what is left out and why is said on standard error.

    Raises:
        HashbenchError: a suite's package is not installed, or two files have one name.
    """
    from hashbench.suites import registry

    chosen = registry.choose(parsed.suite, tiny=parsed.tiny)
    registry.require(chosen.suites)
    for note in chosen.notes:
        say(note, 0)
    return chosen.suites


def _list(parsed: argparse.Namespace) -> int:
    from hashbench.suites import registry

    chosen = registry.choose(parsed.suite or registry.names(), tiny=parsed.tiny)
    specs: list[ModelSpec] = []
    for suite in chosen.suites:
        try:
            specs += registry.catalog(suite)
        except HashbenchError as error:
            if parsed.suite:
                raise
            say(str(error), 0)  # a broken package must not hide the other suites
    _print(specs, parsed.format)
    for note in (*chosen.notes, *_not_installed(chosen.suites)):
        say(note, 0)
    return 0


def _not_installed(names: Sequence[str]) -> list[str]:
    from hashbench.suites import registry

    how = {name: registry.how_to_install(name) for name in names}
    return [f"{name} is not installed: {install}" for name, install in how.items() if install]


def _print(specs: Sequence[ModelSpec], form: str) -> None:
    if form == "json":
        print(json.dumps([dataclasses.asdict(spec) for spec in specs], indent=1))
    elif form == "csv":
        print(_as_csv(specs), end="")
    else:
        print(tabulate([_listed(spec) for spec in specs], headers=COLUMNS, disable_numparse=True, colalign=_ALIGNED))
        print(f"\n{len(specs)} models")


_ALIGNED = tuple("right" if column in ("parameters", "batch size") else "left" for column in COLUMNS)


def _as_csv(specs: Sequence[ModelSpec]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for spec in specs:
        values = {**dataclasses.asdict(spec), "input_shape": _shape(spec), "default": "yes" if spec.default else ""}
        values["devices"] = " ".join(spec.devices)
        values["arguments"] = json.dumps(spec.arguments) if spec.arguments else ""
        writer.writerow([_cell(values[field]) for field in _FIELDS])
    return text.getvalue()


def _cell(value: object) -> object:
    """Names and notes come from packages and zoo files: a spreadsheet must not execute them."""
    return defuse(one_line(value)) if isinstance(value, str) else value


def _listed(spec: ModelSpec) -> tuple[object, ...]:
    return (
        spec.suite,
        one_line(spec.name),
        spec.task,
        count(spec.parameters),
        spec.batch_size,
        _shape(spec),
        "yes" if spec.default else "",
        one_line(_notes(spec)),
    )


def _shape(spec: ModelSpec) -> str:
    return "x".join(map(str, spec.input_shape))


def _notes(spec: ModelSpec) -> str:
    """What the model is for, what cannot run and why, then the note."""
    skips = {"training": spec.skip_training, "inference": spec.skip_inference}
    if spec.skip_training and spec.skip_training == spec.skip_inference:
        skips = {"training or inference": spec.skip_training}
    said = [f"no {mode}: {reason}" for mode, reason in skips.items() if reason]
    needs = [f"needs {' or '.join(spec.devices)}"] if spec.devices else []
    return "; ".join([*needs, *said, *([spec.note] if spec.note else [])])


def count(number: int | None) -> str:
    """A number of parameters in three digits: ``11.7 M``; nothing where it is not known.

    >>> count(11689512), count(999), count(1235814400)
    ('11.7 M', '999', '1.24 B')
    """
    if number is None:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + f" {unit}"
    return str(number)
