"""Build a side and record one run of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hashbench.extensions.implementations.pair.record import RecordedRun, record_run
from hashbench.extensions.implementations.pair.sides import BuiltSide, Side, build, build_wide


def recorded(
    side: Side,
    seed: int,
    *,
    wide: bool,
    keep: frozenset[str] = frozenset(),
    given: Mapping[str, torch.Tensor] | None = None,
) -> RecordedRun:
    """Build a side and record a run of it.

    Args:
        side: what is run.
        seed: of the generators.
        wide: compute in float64, and keep moments; otherwise keep digests.
        keep: ids of nodes whose values are kept, and the calls that wrote them.
        given: contents that replace those of nodes as they are written.
    """
    return _recorded(build_wide(side, seed) if wide else build(side, seed), wide=wide, keep=keep, given=given or {})


def _recorded(side: BuiltSide, *, wide: bool, keep: frozenset[str], given: Mapping[str, torch.Tensor]) -> RecordedRun:
    if side.widened:
        try:
            return _recorded(replace(side, widened=()), wide=wide, keep=keep, given=given)
        except RuntimeError:  # torch compares some dtypes before an op is dispatched
            pass
    return record_run(side.run, side.leaves(), model=side.module, wide=wide, keep=keep, given=given)
