"""Write a script that needs torch alone, from a template, beside the tensors that it loads; and run it.

A folder of templates has the scripts of its package; those of an extension may extend those of the core.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

import hashbench
from hashbench.core.diagnose.calls.call import CapturedCall, CompiledKernel, is_triton
from hashbench.core.processes import Finished, new_python
from hashbench.core.records import Decision

SCRIPT_FILE, TENSORS_FILE = "repro.py", "tensors.pt"
TORCH_ALONE = "It needs torch alone."

_PACKAGE = "hashbench.core.diagnose.repro"
_WIDTH = 100

_RUN = """
import os, sys, traceback
del sys.argv[0]
__file__ = sys.argv[0]
with open(__file__, encoding="utf-8") as file:
    script = compile(file.read(), __file__, "exec")
try:
    exec(script)
    status = 0
except SystemExit as ended:
    status = ended.code
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 70
except BaseException:
    traceback.print_exc()
    status = 70  # and not 1, which says that there is a difference
sys.stdout.flush()
os._exit(status)  # the interpreter's own clean-up takes most of a second with torch
"""
"""Program that runs a script as ``python`` does, but for the exit code of an exception and a message."""


def kernel_file(types: Sequence[str]) -> str:
    """Return the name of the file with the source of a generated kernel whose arguments have these types."""
    return "kernel.py" if is_triton(types) else "kernel.cpp"


def needs_of(kernel: CompiledKernel, device: str) -> str:
    """Return what a script that calls a generated kernel on this kind of device needs, as a sentence."""
    if not is_triton(kernel.types):
        return "It needs torch and a C++ compiler."
    where = "whose interpreter runs the kernel" if device == "cpu" else f"and a device of kind {device}"
    return f"It needs torch with Triton, {where}."


# ------------------------------------------------------------------------------------------------------- templates


def render(name: str, *, package: str = _PACKAGE, **values: Any) -> str:
    """Render the template ``name`` of a package or of the core; raise if it uses a value that was not given."""
    return _environment(package).get_template(name).render(values)


def templates() -> list[str]:
    """Return the names of the core's templates."""
    return _environment(_PACKAGE).list_templates()


@functools.cache  # compiling the templates takes longer than filling them
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, _PACKAGE))]),
        autoescape=False,  # it makes Python and Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"in_docstring": _in_docstring, "table": _table, "facts": _facts}
    return environment


def _in_docstring(text: str) -> str:
    """Escape text for a triple-quoted string."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _table(rows: Iterable[Sequence[object]], *headers: str) -> str:
    """Format a Markdown table."""
    # Not before it is needed: torch._dynamo imports it when a process ends, and the namedtuples that this makes turn
    # CPython's exit status after Ctrl-C into 1. Had we imported it, a process of dynamo's harness would end so.
    from tabulate import tabulate

    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """Format a table of names and values, omitting empty values."""
    return _table([(name, value) for name, value in rows if value], "what", "")


# ---------------------------------------------------------------------------------------------- the top of a script


def metadata(*, torch_version: str = "", python: str = "", packages: Iterable[str] = ()) -> str:
    """Return the PEP 723 header of a script, by which ``uv run`` installs what the script was written with.

    Args:
        torch_version: ``2.14.1+cu130``; pinned without the local part, since indexes have public versions alone. By
            default the one that is here.
        python: ``3.11.7``; any patch release of that minor version, for which this torch has a wheel. By default the
            one that is here.
        packages: further requirements.
    """
    minor = ".".join((python or platform.python_version()).split(".")[:2])
    dependencies = [f"torch=={(torch_version or torch.__version__).partition('+')[0]}", *packages]
    return "\n".join(
        [
            "# /// script",
            f'# requires-python = "=={minor}.*"',
            f"# dependencies = {json.dumps(dependencies)}",
            "# ///",
        ]
    )


def distribution_of(module: str) -> str:
    """Return the installed distribution with this module as an exact requirement (``torchvision==0.24.1``), or ``""``
    for a module from elsewhere than site-packages."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    if Path(file).parent.parent.name not in ("site-packages", "dist-packages"):
        return ""
    names = importlib.metadata.packages_distributions().get(top, [])
    return f"{names[0]}=={importlib.metadata.version(names[0]).partition('+')[0]}" if names else ""


def heading(claim: str, *paragraphs: str, needs: str = TORCH_ALONE) -> str:
    """Return the first lines of a script's docstring: what it shows, what was observed, who wrote it, what it needs."""
    wrapped = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, _WIDTH)]
    return "\n".join(
        [claim, "", *wrapped, f"Written by hashbench {hashbench.__version__} on torch {torch.__version__}. {needs}"]
    )


def cause_words(decision: Decision) -> str:
    """Format a cause and why it is the cause, for a heading."""
    return f"Cause: {decision.cause}, {decision.confidence}. {decision.because.rstrip('.')}."


def place_words(call: CapturedCall | None, *, seen_in: str) -> str:
    """Format the place: ``Seen in the backward of Net.embed (net.py:12 forward), in the model swin_t.``"""
    place = f"Seen in the {call.phase} of {call.module or 'the model'}" if call is not None and call.phase else ""
    place += f" ({call.source})" if call is not None and place and call.source else ""
    text = ", ".join(part for part in (place, seen_in) if part)
    return f"{text[0].upper()}{text[1:]}." if text else ""


# -------------------------------------------------------------------------------------------------------- its folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` when the body ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{word}") for word in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def write(folder: Path, text: str, tensors: Mapping[str, Any], *, kernel: CompiledKernel | None = None) -> None:
    """Write a script into a folder of :func:`new_folder`, with what it loads, and the source of a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own way of saving quantized tensors
        torch.save(dict(tensors), folder / TENSORS_FILE)
    if kernel is not None:
        (folder / kernel_file(kernel.types)).write_text(kernel.source, encoding="utf-8")
    (folder / SCRIPT_FILE).write_text(text, encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- running it


class RunsPython(Protocol):
    """Runs ``python -P -c CODE ARGUMENTS`` in a process without any state of this one."""

    def __call__(self, code: str, *arguments: str, seconds: float) -> Finished:
        """Run the program and return how it ended."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a script ended.

    Attributes:
        problem: why it shows nothing, as ``failed: …`` or ``timeout after 300 s``; empty: it shows something.
        shows: what it printed, by the groups of a pattern.
        differs: its exit code says that there is a difference.
        output: all that it printed; ``None``: it did not end.
    """

    problem: str
    shows: tuple[str, ...] = ()
    differs: bool = False
    output: str | None = None


def run(folder: Path, pattern: re.Pattern[str], *arguments: str, timeout: float, by: RunsPython = new_python) -> Ran:
    """Run the script of a folder in a new process.

    Args:
        folder: of the script.
        pattern: of what it prints.
        arguments: of the script.
        timeout: seconds.
        by: runs the program.
    """
    try:
        done = by(_RUN, str((folder / SCRIPT_FILE).resolve()), *arguments, seconds=timeout)
    except OSError as error:
        return Ran(f"failed: {error}")
    if done.status is None:
        return Ran(f"timeout after {timeout:g} s")
    found, output = pattern.search(done.stdout), done.stdout + done.stderr
    if done.status not in (0, 1) or found is None:
        return Ran(f"failed: {done.last_line}", output=output)
    return Ran("", found.groups(), done.status == 1, output)
