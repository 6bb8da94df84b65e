"""All programs, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.extensions.ranks.programs import (
    data_parallel,
    further,
    messages,
    outside,
    pipeline,
    replicas,
    sharded,
    tensor_parallel,
)
from tests.extensions.ranks.programs.base import Program

PROGRAMS: Mapping[str, Program] = {
    **data_parallel.PROGRAMS,
    **sharded.PROGRAMS,
    **tensor_parallel.PROGRAMS,
    **pipeline.PROGRAMS,
    **messages.PROGRAMS,
    **outside.PROGRAMS,
    **replicas.PROGRAMS,
    **further.PROGRAMS,
}
