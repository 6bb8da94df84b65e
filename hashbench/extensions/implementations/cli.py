"""The flags of ``hashbench numeric`` that compare checkpoints, dumps and implementations."""

from __future__ import annotations

import argparse
from pathlib import Path

from hashbench.cli import flags
from hashbench.cli.parser import Flags


def add_flags(what: Flags, how: Flags) -> None:
    """Add ``--weights`` and ``--dumps`` to what is compared, ``--same-function`` to how a file is."""
    text = (
        "Compare the weights of two checkpoints, whatever they are called: A and B are .safetensors or folders of them."
    )
    what.add_argument("--weights", nargs=2, type=Path, metavar=("A", "B"), help=text)
    text = (
        "Name the first tensor of dump B that dump A has no partner of; each a folder of tensors, or of HF's debugger."
    )
    what.add_argument("--dumps", nargs=2, type=Path, metavar=("A", "B"), help=text)
    text = (
        "Find whether both compute the same function, whatever modules are called; make_a() and make_b() need no flag."
    )
    how.add_argument("--same-function", action="store_true", help=text)


def answer(parsed: argparse.Namespace) -> int | None:
    """Compare checkpoints or dumps; return ``None`` where neither was given."""
    if parsed.weights is not None:
        from hashbench.extensions.implementations.weights import compare_checkpoints

        one, other = parsed.weights
        finding = compare_checkpoints(one, other, limit=parsed.lines)
    elif parsed.dumps is not None:
        from hashbench.extensions.implementations.dumps.compare import compare_dumps

        one, other = parsed.dumps
        finding = compare_dumps(one, other, rtol=parsed.rtol, limit=parsed.lines)
    else:
        return None
    return flags.show_finding(finding, parsed, title="hashbench numeric", of=f"{one} and {other}")
