"""The subcommands that run no models: ``list``, ``diff``, ``compare``, ``replay``, ``env`` and ``docs``; and the values
of ``--suite``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.cli import flags, replaying
from hashbench.cli.flags import say
from hashbench.cli.parser import EXIT_DIFFERENCE, Commands, Flags, OneLineParser, did_you_mean
from hashbench.core import extensions
from hashbench.core.commands import replay_command
from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_text, shipped_folder
from hashbench.core.records import ModelSpec
from hashbench.core.text import count as counted
from hashbench.core.text import one_line

if TYPE_CHECKING:
    from hashbench.core.finding import Finding

COLUMNS = ("suite", "name", "task", "parameters", "batch size", "input", "default", "notes")
_ALIGNED = tuple("right" if column in ("parameters", "batch size") else "left" for column in COLUMNS)


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    listing = commands.add_parser(
        "list", help="List the models of a suite: what each does, its size, and where it cannot run."
    )
    add_suites(listing, default=[], otherwise="all that there are")
    flags.output_format(listing, "table", "csv", "json")
    listing.set_defaults(command=_list)

    diff = commands.add_parser("diff", help="Find the first divergence of two traces, or of two DebugMode logs.")
    diff.add_argument(
        "first", type=Path, metavar="A.log", help="Read one run from A.log: a trace, or a log of DebugMode.save_logs."
    )
    diff.add_argument("second", type=Path, metavar="B.log", help="Read the second run from B.log.")
    flags.whole(diff, "--context", least=0, default=3, text="Show N records before and after the divergence.")
    flags.report(diff)
    diff.set_defaults(command=_diff)

    compare = commands.add_parser("compare", help="Compare two sweeps or two audits.")
    compare.add_argument(
        "base",
        type=Path,
        metavar="BASE",
        help="Compare with BASE: a CSV or results folder; CSVs of benchmarks/dynamo, too.",
    )
    compare.add_argument("new", type=Path, metavar="NEW", help="Report what changed in NEW, a result of the same kind.")
    flags.output_format(compare, "text", "markdown", "json", "csv")
    text = "Print the verdict as a JSON document, as --format json does."
    compare.add_argument("--json", dest="format", action="store_const", const="json", help=text)
    compare.set_defaults(command=_compare)

    replaying.add(commands)

    _add_merge(commands.add_parser("merge", help="Merge the partitions of one sweep into one folder."))

    env = commands.add_parser("env", help="Print the environment of this machine as JSON.")
    env.add_argument("-d", "--device", default="cpu", metavar="D", help="Describe device D: cpu, cuda, xpu, …")
    text = "Describe the machine anew; what was seen is kept for a day."
    env.add_argument("--fresh", action="store_true", help=text)
    env.set_defaults(command=_env)

    native = commands.add_parser("native", help="Compile the native tracer, or print why it cannot be compiled.")
    native.set_defaults(command=_native)

    docs = commands.add_parser("docs", help="Print the documentation: the list of pages, or one page.")
    docs.add_argument("page", nargs="?", default="", metavar="PAGE", help="Print PAGE (default: list all pages).")
    docs.set_defaults(command=_docs)


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench.core.divergence import find as find_divergence
    from hashbench.core.divergence.text import finding_of
    from hashbench.core.trace import file
    from hashbench.core.trace.file import refuse_different

    paths = (parsed.first, parsed.second)
    texts = [_text_of(path) for path in paths]
    for kind in extensions.kinds_of_diffs():
        owned = [kind.owns(text) for text in texts]
        if all(owned):
            found = kind.diff(texts, list(map(str, paths)), context=parsed.context)
            found = dataclasses.replace(found, next=() if found.equal else (_more_of(paths, parsed.context),))
            return _show_diff(found, parsed)
        if any(owned):
            raise HashbenchError(
                f"cannot compare {kind.KIND} ({paths[owned.index(True)]}) with a trace ({paths[owned.index(False)]})",
                consequence="nothing was compared",
                tip="Name two traces of hashbench, or two logs of `DebugMode.save_logs`.",
            )
    first, second = (file.loads(text, name=str(path)) for text, path in zip(texts, paths, strict=True))
    refuse_different(first.tracer, second.tracer, names=(str(parsed.first), str(parsed.second)))
    verdict = find_divergence(first, second)
    commands = () if verdict.equal else _next_of(paths, parsed.context)
    return _show_diff(finding_of(verdict, context=parsed.context, commands=commands), parsed)


def _show_diff(finding: Finding, parsed: argparse.Namespace) -> int:
    return flags.show_finding(finding, parsed, title="hashbench diff", of=f"{parsed.first} and {parsed.second}")


def _next_of(paths: Sequence[Path], context: int) -> Iterator[str]:
    """Yield the command that replays the captured call, if the traces lie in a sweep's folder, and one for more
    records."""
    key = re.sub(r"\.run\d+\.log(\.gz)?$", "", paths[0].name)
    repro = paths[0].absolute().parent.parent / "repro" / key
    if (repro / "call.json").exists():
        yield replay_command(Path(os.path.relpath(repro)))
    yield _more_of(paths, context)


def _more_of(paths: Sequence[Path], context: int) -> str:
    return shlex.join(["hashbench", "diff", *map(str, paths), "--context", str(max(10, 2 * context))])


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise HashbenchError(
            f"cannot read the trace {path}",
            consequence=f"{getattr(error, 'strerror', None) or error}, so nothing was compared",
            tip="Make it again with `hashbench sweep --keep-traces` or `HashDebugTrace.save`.",
        ) from error


def _compare(parsed: argparse.Namespace) -> int:
    from hashbench.core.finding import as_text
    from hashbench.core.report import compare, text
    from hashbench.core.report.sentence import clauses_between
    from hashbench.core.results import load
    from hashbench.tools.audit import audit_table

    base, new = (audit_table.audit_kind(path) for path in (parsed.base, parsed.new))
    if base is not new:
        known, other = (parsed.base, parsed.new) if base is not None else (parsed.new, parsed.base)
        names = [kind.name for kind in (base, new) if kind is not None]
        raise HashbenchError(
            f"{other} is {names[1] if len(names) == 2 else 'not an audit'} and {known} is {names[0]}",
            consequence="they cannot be compared",
            tip="Compare two audits of the same kind, or two sweeps.",
        )
    if base is None:
        before, after = load.load_sweep(parsed.base), load.load_sweep(parsed.new)
        comparison = compare.compare(before, after)
        compare.require_overlap(comparison)
        pairs = [(change.base, change.new) for change in comparison.changes]
        files = {side: load.csv_files(getattr(parsed, side)) for side in ("base", "new")}
        about = extensions.remarks_on(pairs, **files)
        comparison = dataclasses.replace(comparison, remarks=(*comparison.remarks, *about))
        worse = comparison.got_worse
        pairs = [(change.base, change.new) for change in comparison.changes if change.outcome.worse]
        kernels = extensions.kernels_of(pairs, **files)
        clauses = clauses_between(comparison, base=before, new=after, kernels=kernels)
        if parsed.format == "text" and flags.look_of(sys.stdout).width is not None:
            written = as_text(text.finding_of(comparison, clauses), width=flags.terminal_width())
        elif parsed.format == "csv":
            written = text.as_csv(comparison)
        else:
            written = getattr(text, f"as_{parsed.format}")(comparison, clauses)
    else:
        from hashbench.tools.audit import report as audits

        audited = audits.compare(audit_table.read(parsed.base, base), audit_table.read(parsed.new, base), base)
        compare.require_overlap(audited)
        written = getattr(audits, f"as_{parsed.format}")(audited)
        worse = audited.got_worse
    flags.show(written.rstrip("\n"))
    return EXIT_DIFFERENCE if worse else 0


def _add_merge(merge: OneLineParser) -> None:
    merge.add_argument("output", type=Path, metavar="OUTPUT", help="Write the whole sweep into OUTPUT, a new folder.")
    merge.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="Read DIR, the output of one `hashbench sweep --partition-id`.",
    )
    merge.add_argument(
        "--allow-missing", action="store_true", help="Allow missing partitions; their models count as missing."
    )
    merge.set_defaults(command=_merge)


def _merge(parsed: argparse.Namespace) -> int:
    from hashbench.core.results.merge import merge
    from hashbench.core.text import count, join_limited

    merged = merge(parsed.output, parsed.folders, allow_missing=parsed.allow_missing)
    if merged.missing:
        names = join_limited([name for _, name in merged.missing], 5)
        flags.show(f"{count(len(merged.missing), 'model')} without a row: {names}.")
        print(f"To run them: the sweep's command without partitions, with --resume --output {merged.output}")
    print(f"{count(merged.rows, 'row')} of {count(merged.shards, 'shard')}. Results: {merged.output / 'accuracy.csv'}")
    return 0


def _env(parsed: argparse.Namespace) -> int:
    from hashbench.core.run.environment import collect_in_child
    from hashbench.core.workers import WORKER_VARIABLES

    seen = collect_in_child(device=parsed.device, variables=WORKER_VARIABLES, fresh=parsed.fresh)
    print(json.dumps(seen, indent=2))
    return 0


def _native(_: argparse.Namespace) -> int:
    from hashbench.core.native.build import TRIAL, Unavailable, build

    found = build(trial=TRIAL, retry=True)
    if isinstance(found, Unavailable):
        advice = f"{found.advice[:1].upper()}{found.advice[1:]}."
        raise HashbenchError(found.what, consequence="the Python tracer is used", tip=advice)
    print(f"native tracer: {found.path}{f' ({found.note})' if found.note else ''}")
    return 0


def _docs(parsed: argparse.Namespace) -> int:
    folder = shipped_folder("docs", "index.md")
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))}
    page = parsed.page.removeprefix("docs/").removesuffix(".md")
    if not page:
        print(f"{_contents(pages['index'])}\n\nhashbench docs PAGE prints a page. The pages are in {folder}")
    elif page in pages:
        print(pages[page].read_text(encoding="utf-8").rstrip("\n"))
    else:
        raise HashbenchError(
            f"the documentation has no page {parsed.page!r}",
            consequence="nothing to print",
            tip=did_you_mean(page, pages).removeprefix(". ") or "`hashbench docs` lists all pages.",
        )
    return 0


def _contents(index: Path) -> str:
    """Return the groups of pages that the index lists, a page a line."""
    lines = []
    for line in index.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            lines.append(f"\n{line[3:]}")
        elif page := re.match(r"( *)- \[(\w+)\]\(\w+\.md\): (.+)", line):
            lines.append(f"  {page[1] + page[2]:23}{page[3]}")
    return "\n".join(lines).lstrip("\n")


# ---------------------------------------------------------------------------------------------------- suites, list


def add_suites(parser: Flags, *, default: list[str], otherwise: str) -> None:
    """Add ``--suite`` and ``--tiny``."""
    text = f"Take models from the suites S: names, all, or Python files (default: {otherwise})."
    parser.add_argument("--suite", nargs="+", default=default, metavar="S", help=text)
    parser.add_argument("--tiny", action="store_true", help="Use the small variant of each suite that has one.")


def suites_to_sweep(parsed: argparse.Namespace) -> tuple[str, ...]:
    """Return the suites that a command line selects; warn on standard error about those that are left out.

    Raises:
        HashbenchError: a suite's package is not installed, or two files have the same name.
    """
    from hashbench.core.suites import registry

    chosen = registry.choose(parsed.suite, tiny=parsed.tiny)
    registry.require(chosen.suites)
    for note in chosen.notes:
        say(note)
    return chosen.suites


def _list(parsed: argparse.Namespace) -> int:
    from hashbench.core.suites import registry

    chosen = registry.choose(parsed.suite or registry.names(), tiny=parsed.tiny)
    specs: list[ModelSpec] = []
    for suite in chosen.suites:
        try:
            specs += registry.catalog(suite)
        except HashbenchError as error:
            if parsed.suite:
                raise
            say(str(error))  # a broken package must not hide the other suites
    _print(specs, parsed.format)
    install = {suite: registry.how_to_install(suite) for suite in chosen.suites}
    for note in (*chosen.notes, *(f"{suite} is not installed: {how}" for suite, how in install.items() if how)):
        say(note)
    return 0


def _print(specs: Sequence[ModelSpec], form: str) -> None:
    if form == "json":
        print(json.dumps([dataclasses.asdict(spec) for spec in specs], indent=1))
    elif form == "csv":
        print(_as_csv(specs), end="")
    else:
        from tabulate import tabulate

        lines = [_listed(spec) for spec in specs]
        flags.show(tabulate(lines, headers=COLUMNS, disable_numparse=True, colalign=_ALIGNED))
        print(f"\n{counted(len(specs), 'model')}")


def _as_csv(specs: Sequence[ModelSpec]) -> str:
    from hashbench.core.results.rows import csv_text

    lines = []
    for spec in specs:
        values = {**dataclasses.asdict(spec), "input_shape": _shape(spec), "default": "yes" if spec.default else ""}
        values["devices"] = " ".join(spec.devices)
        values["arguments"] = json.dumps(spec.arguments) if spec.arguments else ""
        lines.append(values.values())
    return csv_text((field.name for field in dataclasses.fields(ModelSpec)), lines)


def _listed(spec: ModelSpec) -> tuple[object, ...]:
    default, parameters = "yes" if spec.default else "", count(spec.parameters)
    line = (spec.suite, one_line(spec.name), spec.task, parameters, spec.batch_size, _shape(spec), default)
    return (*line, one_line(_notes(spec)))


def _shape(spec: ModelSpec) -> str:
    return "x".join(map(str, spec.input_shape))


def _notes(spec: ModelSpec) -> str:
    """Return what the model does, the devices that it needs, and what cannot run and why."""
    skips = {"training": spec.skip_training, "inference": spec.skip_inference}
    if spec.skip_training == spec.skip_inference:
        skips = {"training or inference": spec.skip_training}
    said = [f"no {mode}: {reason}" for mode, reason in skips.items() if reason]
    needs = f"needs {' or '.join(spec.devices)}" if spec.devices else ""
    return "; ".join(filter(None, [spec.note, needs, *said]))


def count(number: int | None) -> str:
    """Return a number of parameters in three digits, ``11.7 M``; empty where it is unknown.

    >>> count(11689512), count(999), count(1235814400)
    ('11.7 M', '999', '1.24 B')
    """
    if number is None:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + f" {unit}"
    return str(number)
