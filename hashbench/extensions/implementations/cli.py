"""The flag of ``hashbench numeric`` that compares checkpoints."""

from __future__ import annotations

from pathlib import Path

from hashbench.cli.parser import Flags


def add_flags(flags: Flags) -> None:
    """Add ``--weights``."""
    text = (
        "Compare the weights of two checkpoints, whatever they are called: A and B are .safetensors or folders of them."
    )
    flags.add_argument("--weights", nargs=2, type=Path, metavar=("A", "B"), help=text)
