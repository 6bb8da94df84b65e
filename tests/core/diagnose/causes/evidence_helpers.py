"""Evidence from short texts, for the tests of causes."""

from __future__ import annotations

from typing import Any

from hashbench.core.catalog import EXPERIMENTS, REPEATED, Remedy, places
from hashbench.core.records import CallFacts, Evidence
from tests.experiment_texts import result

EVERYWHERE = places(EXPERIMENTS.values(), *(on for on in REPEATED if on != "compilation"))
"""What a cause may be decided from: other compilations prove a stage of the compiler instead."""


def seen(origin: str, *results: str, call: CallFacts | None = None, **facts: Any) -> Evidence:
    """Evidence from texts: ``pair/clocks 0/20``, and ``clocks 0/20`` of a captured call."""
    texts = [text if "/" in text.partition(" ")[0] else f"call/{text}" for text in results]
    return Evidence(origin, call=call, arms=tuple(map(result, texts)), **facts)


def kernel(*results: str, **facts: Any) -> Evidence:
    """Evidence on a captured call of one of torch's own ops, or of a ``custom`` one."""
    return seen("kernel", *results, call=CallFacts("aten.some_op.default", **{"matches_record": True, **facts}))


def custom(*results: str, **facts: Any) -> Evidence:
    return kernel(*results, custom=True, **facts)


def uncaptured(*arms: str, **facts: Any) -> Evidence:
    return seen("kernel", *arms, call=CallFacts("aten.some_op.default", limits="it needs 9000 MiB"), **facts)


ALWAYS = "repeat 20/20"


NEVER = "repeat 0/20"


RARE = "repeat 1/20"


TWO_OUTCOMES = "repeat 10/20~2"


PAIR = "pair/pair 20/20"


INSIDE = "process/within_process 4/4"


def beginning(remedy: Remedy) -> str:
    """The clause up to what an experiment may name in it."""
    return remedy.clause.partition("{")[0].lower()
