"""The flags of invariances."""

from __future__ import annotations

import argparse
from typing import Any

from hashbench.cli.flags import invariances_of
from hashbench.cli.parser import Flags
from hashbench.core.records import INVARIANCE_GROUPS
from hashbench.extensions.invariance.ops import DTYPES


def add_flags(flags: Flags) -> None:
    """Add ``--batch-invariant`` and ``--invariance``."""
    text = "Compare each item of the forward pass at smaller batch sizes with the full batch."
    flags.add_argument("--batch-invariant", action="store_true", help=text)
    text = f"Check the invariances I,…, any of {', '.join(INVARIANCE_GROUPS)}; implies --batch-invariant."
    flags.add_argument("--invariance", action=_StoreInvariances, default="batch", metavar="I,…", help=text)


def add_audit_flags(flags: Flags) -> None:
    """Add ``--rows``."""
    text = "Measure batch invariance instead: whether the rows of an item depend on the other items."
    flags.add_argument(
        "--rows", action="store_true", dest="of_rows", help=f"{text} Default dtypes: {' '.join(DTYPES)}."
    )


class _StoreInvariances(argparse.Action):
    """Store the invariances, and set ``batch_invariant`` with them."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _flag: str | None = None
    ) -> None:
        try:
            invariances_of(values)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.invariance, namespace.batch_invariant = values, True
