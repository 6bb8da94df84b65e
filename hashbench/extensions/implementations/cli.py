"""The flags of ``hashbench numeric`` that compare checkpoints and implementations."""

from __future__ import annotations

from pathlib import Path

from hashbench.cli.parser import Flags


def add_flags(what: Flags, how: Flags) -> None:
    """Add ``--weights`` to what is compared, ``--same-function`` to how a file is."""
    text = (
        "Compare the weights of two checkpoints, whatever they are called: A and B are .safetensors or folders of them."
    )
    what.add_argument("--weights", nargs=2, type=Path, metavar=("A", "B"), help=text)
    text = (
        "Find whether both compute the same function, whatever modules are called; make_a() and make_b() need no flag."
    )
    how.add_argument("--same-function", action="store_true", help=text)
