"""A model built twice from one seed: weights and inputs that differ are not those of the next process either.

Runs of one build agree on what the build itself drew from elsewhere: ``np.random.default_rng()``, a clock, a set's
order. That both builds are made in one process can mislead in both directions: what differs between processes alone
(``hash`` of a text) is not seen, and a counter of the program's module differs here and in no fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hashbench.core.errors import log_error
from hashbench.core.records import SAME_BUILD, TensorDigest
from hashbench.core.run.leaves import leaves
from hashbench.core.run.outcome import failure_of
from hashbench.core.run.workload import Workload
from hashbench.core.text import join_limited
from hashbench.core.trace.digest import digest, python_digest, unobserved

LONGEST = 60.0
"""Seconds of a first build beyond which no second one is made: a large checkpoint is read from a disk."""


def contents_of(workload: Workload) -> Mapping[str, TensorDigest]:
    """Return the digests of parameters, buffers, attributes and example inputs, by name. ``make_inputs`` is not called:
    every run calls it."""
    found: dict[str, TensorDigest] = {}
    with unobserved():
        for part, name in ((workload.module, "model"), (workload.inputs, "input")):
            for path, leaf in leaves(part, name):
                found[path] = digest(leaf) if hasattr(leaf, "data_ptr") else python_digest(leaf)
    return found


def second_build(first: Mapping[str, TensorDigest], build: Callable[[], Workload], *, first_seconds: float) -> str:
    """Build again; return :data:`~hashbench.core.records.SAME_BUILD`, ``differs in …``, or why that is not known.

    Args:
        first: contents of the first build, before anything ran.
        build: makes the second one from the same seed.
        first_seconds: what the first one took.
    """
    if first_seconds > LONGEST:
        return f"not made: the first took {first_seconds:.0f} s"
    try:
        second = contents_of(build())
    except Exception as error:
        log_error("building the model a second time failed")
        return f"failed: {failure_of(error).error}"
    names = differing(first, second)
    return f"differs in {join_limited(names)}, so another process may give other results" if names else SAME_BUILD


def differing(first: Mapping[str, TensorDigest], second: Mapping[str, TensorDigest]) -> tuple[str, ...]:
    """Return the names of parts that differ, or that one build alone has."""
    return tuple(name for name in {**first, **second} if first.get(name) != second.get(name))
