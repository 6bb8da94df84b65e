"""The flag of stress."""

from __future__ import annotations

from hashbench.cli.parser import Flags


def add_flags(flags: Flags) -> None:
    """Add ``--stress``."""
    text = "Rerun passing models under perturbations (threads, load, memory, addresses, GC) to find flaky ones."
    flags.add_argument("--stress", action="store_true", help=text)
