"""Environment variables that are set for a while: what is started or imported meanwhile sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def variables(wanted: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Environment variables as ``wanted``, put back at the end. With ``unless_set``, those that the caller's
    environment has stay as they are."""
    changed = {name: value for name, value in wanted.items() if not (unless_set and name in os.environ)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
