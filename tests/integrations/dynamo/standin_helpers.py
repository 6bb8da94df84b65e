"""One model in the stand-in, with hashbench in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hashbench
from tests.integrations.dynamo.dynamo_helpers import Found, Standin, a_session


def with_us(standin: Standin, name: str, *flags: str, **session: Any) -> Found:
    mode = "training" if "--training" in flags else "inference"
    return standin.run(name, *flags, session=a_session(standin.folder.parent / "ours", mode=mode, **session))


DIFFER, SKIPPED = "eager_two_runs_differ", "pass_due_to_skip"


def planted_fault() -> Callable[..., None]:
    """A function that raises, in what looks like a file of ours."""
    scope: dict[str, Any] = {}
    text = "def raises(*_, **__):\n    raise RuntimeError('a planted fault')\n"
    exec(compile(text, str(hashbench.__file__), "exec"), scope)
    return scope["raises"]  # type: ignore[no-any-return]
