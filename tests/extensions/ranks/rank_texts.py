"""Verdicts whose text the golden files hold: one of each origin and of each kind of line."""

from __future__ import annotations

from collections.abc import Mapping

from tests.extensions.ranks.test_find import CASES, EARLY, STEPS
from tests.extensions.ranks.test_replicas import CASES as REPLICAS

DIFFS: Mapping[str, str] = {
    **{
        name: CASES[name].lines
        for name in (
            "nothing differs",
            "a kernel in front of an all-reduce",
            "through a pipeline of three ranks",
            "messages of equal content arrive in another order",
            "a rank without a trace gave something",
            "two races, the later one on the lower rank",
            "two races that no collective orders",
            "pickled bytes that differ and steer nothing",
            "other data on one rank",
            "a step that differs, and a later race in another step",
            "the bytes that a rank gave were written by Python",
            "times that ranks exchange, in front of what another one does otherwise",
            "an unseeded generator on one rank",
            "numbers that ranks make each in its way behind a mean of other data of one",
            "a setting that changed on one rank",
        )
    },
    "an early read": EARLY.format(zero="", one="early neg"),
    "a rank that ended": STEPS.format(zero="", one="2: ended SIGKILL"),
}
"""Name → the lines of two runs on several ranks."""

DOCUMENTS = (
    "nothing differs",
    "a rank without a trace gave something",
    "a step that differs, and a later race in another step",
    "numbers that ranks make each in its way behind a mean of other data of one",
    "an early read",
    "a rank that ended",
)
"""Names of those whose JSON document is held as well."""

CHECKS: Mapping[str, str] = {
    name: REPLICAS[name].lines
    for name in (
        "replicas agree",
        "a gradient that is not reduced",
        "a penalty on one rank behind the reduction",
        "a kernel behind the reduction",
        "a parameter from another seed",
        "an argument of the optimizer",
        "a guilty collective inside an op that is told by it",
        "a parameter that differs when it is first read",
        "nothing is known, and the gradient is reduced",
        "nothing is known, and the gradient is not reduced",
    )
}
"""Name → the lines of one run on several ranks."""
