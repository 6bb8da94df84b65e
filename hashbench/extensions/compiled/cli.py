"""The flags of compiled models."""

from __future__ import annotations

from hashbench.cli.flags import at_least
from hashbench.cli.parser import Flags


def add_flags(flags: Flags) -> None:
    """Add ``--backend`` and ``--compilations``."""
    text = "Compare the program that torch.compile makes with BACKEND (inductor, aot_eager, …) with eager mode."
    flags.add_argument("--backend", default="", metavar="BACKEND", help=text)
    text = "Compare N compilations: fresh and warm cache, another process, compile threads, max_autotune, one thread."
    flags.add_argument("--compilations", type=at_least(1, most=7), default=1, metavar="N", help=text)
