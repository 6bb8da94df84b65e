"""The flags of ``hashbench numeric`` that compare checkpoints, dumps and implementations."""

from __future__ import annotations

from pathlib import Path

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
