"""The flags of compiled models."""

from __future__ import annotations

import argparse
from typing import Any

from hashbench.cli.flags import at_least
from hashbench.cli.parser import Flags
from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled.as_device.devices import backend_as, device_of


class _Backend(argparse.Action):
    """Stores ``--backend`` or ``--as``; of both, the backend is ``inductor@cuda:90``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        setattr(namespace, self.dest, values)
        namespace.backend = backend_as(namespace.backend, namespace.as_device)
        try:
            device_of(namespace.backend)
        except HashbenchError as error:
            parser.error(str(error).removesuffix("."))


def add_flags(flags: Flags) -> None:
    """Add ``--backend`` and ``--compilations``."""
    text = "Compare the program that torch.compile makes with BACKEND (inductor, aot_eager, …) with eager mode."
    flags.add_argument("--backend", default="", metavar="BACKEND", action=_Backend, help=text)
    text = "Compile Triton code for DEVICE (cuda:80, cuda:90, …) without one, and interpret it on the CPU."
    flags.add_argument("--as", default="", metavar="DEVICE", dest="as_device", action=_Backend, help=text)
    text = "Compare N compilations: fresh and warm cache, another process, compile threads, max_autotune, one thread."
    flags.add_argument("--compilations", type=at_least(1, most=7), default=1, metavar="N", help=text)
