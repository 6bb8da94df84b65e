"""The flags of ``hashbench numeric`` that judge a kernel by its reference."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.cli import flags
from hashbench.cli.parser import Flags, did_you_mean
from hashbench.core.errors import HashbenchError
from hashbench.extensions.kernels.file import NamedFunction

if TYPE_CHECKING:
    from hashbench.core.finding import Finding
    from hashbench.extensions.kernels.file import FileKernel
    from hashbench.extensions.kernels.verdict import RoundingVerdict

DTYPES = ("float32", "bfloat16", "float16", "float64")

SECONDS, SEED = 30.0, 1337
"""Defaults: of the time for one kernel in one dtype, and of the generators."""


def add_flags(what: Flags, how: Flags) -> None:
    """Add ``--kernel`` to what is compared, and flags on how it is judged."""
    text = "Find whether FILE.py:NAME, a kernel, differs from its reference by more than rounding."
    what.add_argument("--kernel", type=_named, metavar="FILE.py:NAME", help=text)
    text = "Compare the kernel with FILE.py:NAME, the same function in plain torch."
    how.add_argument("--reference", type=_named, metavar="FILE.py:NAME", help=text)
    text = "Call FILE.py:NAME for the kernel's inputs (default: NAME_inputs or inputs of its own file)."
    how.add_argument("--inputs", type=_named, metavar="FILE.py:NAME", help=text)
    how.add_argument("--backward", action="store_true", help="Check the kernel's gradients as well.")
    text = "Allow the kernel errors of R, relative to the largest value of a result."
    how.add_argument("--approximate", type=flags.at_least(0, float), metavar="R", help=text)
    text = f"Check the kernel in each of the dtypes D,D of {', '.join(DTYPES)} (default: as its inputs are)."
    how.add_argument("--dtypes", type=_dtypes, metavar="D,D", help=text)
    how.add_argument("--without", type=_words, metavar="V,V", help="Exclude the variations V,V of the kernel's inputs.")
    text = "Spend at most S seconds on variations of the kernel's inputs, in each dtype."
    flags.seconds(how, "--seconds", text, least=1, default=SECONDS)


def answer(parsed: argparse.Namespace) -> int | None:
    """Judge a kernel; return ``None`` where none was given."""
    if parsed.kernel is None:
        return None
    for each in (parsed.kernel, parsed.reference, parsed.inputs):
        if each is not None:
            each.refuse_missing()
    with flags.prints_aside(parsed):
        finding, page = _judged(parsed)
    of = f"{parsed.kernel} and {parsed.reference}"
    return flags.show_finding(finding, parsed, title="hashbench numeric", of=of, **page)


def _judged(parsed: argparse.Namespace) -> tuple[Finding, dict[str, Any]]:
    """Return the finding on a kernel, and what its page shows beside it."""
    from hashbench.extensions.kernels.file import load_kernel
    from hashbench.extensions.kernels.finding import finding_by_dtype, finding_of
    from hashbench.extensions.kernels.page import figures_of

    loaded = load_kernel(parsed.kernel, parsed.reference, parsed.inputs, seed=parsed.seed)
    with flags.phases_shown():
        if parsed.dtypes is None:
            verdicts: Mapping[str, RoundingVerdict] = {"": _verdict(loaded, parsed)}
        else:
            verdicts = {dtype: _verdict_in(dtype, loaded, parsed) for dtype in parsed.dtypes}
    page = figures_of(verdicts)
    asks = page and parsed.html is None and not all(verdict.right for verdict in verdicts.values())
    commands = [_with_page(parsed)] if asks else []
    if parsed.dtypes is None:
        return finding_of(verdicts[""], commands=commands), page
    return finding_by_dtype(verdicts, commands=commands), page


def _verdict_in(dtype: str, loaded: FileKernel, parsed: argparse.Namespace) -> RoundingVerdict:
    """Return the verdict in a dtype; not known where nothing can be judged in it."""
    from hashbench.core.processes import tell_phase
    from hashbench.extensions.kernels.verdict import KernelOutcome, RoundingVerdict

    tell_phase(dtype)
    try:
        return _verdict(loaded.cast(dtype), parsed)
    except HashbenchError as error:
        return RoundingVerdict(KernelOutcome.NOT_KNOWN, reason=str(error), dtype=dtype, seed=parsed.seed)


def _verdict(loaded: FileKernel, parsed: argparse.Namespace) -> RoundingVerdict:
    from hashbench.core.processes import tell_phase
    from hashbench.extensions.kernels.check import within_rounding

    try:
        return within_rounding(
            loaded.kernel,
            loaded.reference,
            *loaded.inputs,
            kwargs=loaded.named,
            backward=parsed.backward,
            approximate=parsed.approximate,
            without=parsed.without or (),
            seed=parsed.seed,
            seconds=parsed.seconds,
            progress=tell_phase,
        )
    except SystemExit as error:
        what = f"cannot judge {parsed.kernel}"
        consequence = f"it, or its reference, ended the program with {error.code!r}"
        raise HashbenchError(what, consequence=consequence, tip="Let it raise another exception.") from error


def _with_page(parsed: argparse.Namespace) -> str:
    """Return the command that writes a page as well."""
    words = ["--kernel", str(parsed.kernel), "--reference", str(parsed.reference)]
    for name, default in (("inputs", None), ("approximate", None), ("seed", SEED), ("seconds", SECONDS)):
        value = getattr(parsed, name)
        words += [f"--{name}={value}"] if value != default else []
    words += [f"--{name}={','.join(value)}" for name in ("dtypes", "without") if (value := getattr(parsed, name))]
    words += ["--backward"] if parsed.backward else []
    return shlex.join(["hashbench", "numeric", *words, "--html", f"{parsed.kernel.name}.html"])


# ---------------------------------------------------------------------------------------------- values of flags


def _named(text: str) -> NamedFunction:
    path, colon, name = text.rpartition(":")
    if not (colon and path and all(part.isidentifier() for part in name.split("."))):
        raise argparse.ArgumentTypeError(f"must be a file and a function in it, as kernels.py:softmax, got {text!r}")
    return NamedFunction(Path(path), name)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _dtypes(text: str) -> tuple[str, ...]:
    names = _words(text)
    for name in names:
        if name not in DTYPES:
            problem = f"{name!r} is none of {', '.join(DTYPES)}"
            raise argparse.ArgumentTypeError(f"{problem}{did_you_mean(name, DTYPES)}")
    if not names:
        raise argparse.ArgumentTypeError("must name a dtype")
    return names
