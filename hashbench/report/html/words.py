"""What the words of a report mean, in a sentence for somebody who reads one for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hashbench.report.compare import verdict_of
from hashbench.report.expectations import Standing

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "accumulation_order": "Threads add to one number in any order, and every order rounds otherwise.",
        "write_race": "Several values are written to one place, and another one is last each time.",
        "overlapping_views": "An in-place op overwrites memory that it still has to read through another view.",
        "unordered_output": "The values are right and their order is another each time.",
        "uninitialized_memory": "Memory is read that was allocated and never written.",
        "alignment": "Where the memory happens to lie decides which path the kernel takes.",
        "algorithm_selection": "A library chooses another algorithm each time, and each rounds otherwise.",
        "contention": "The result depends on what else the machine is doing.",
        "rng": "A random generator that the reset does not reach was in another state.",
        "outside_value": "A value from outside torch differs: a clock, entropy, a file.",
        "surviving_state": "Something that an earlier run left behind changed the next one.",
        "call_order": "The same ops ran in another order, or read from each other otherwise.",
        "control_flow": "An earlier value differed and the program took another path.",
        "input_pipeline": "The model's inputs differ before the first op.",
        "initial_state": "Parameters or buffers differ before the first op.",
        "external_mutation": "Memory was written behind torch's back.",
        "global_settings": "A run changed a global setting of torch.",
        "opaque_kernel": "A custom op differs from equal inputs, and no experiment explains it.",
        "opaque_producer": "What the op read was made by code that torch does not see.",
        "representation": "The values are equal; only their bits differ (the sign of a zero, the payload of a NaN).",
        "masked_by_tracing": "The runs differ only while nobody looks: with tracing they agree.",
        "unreproduced": "It differed once and never again.",
        "unknown": "The experiments do not decide it; they are listed as evidence.",
    }
)

STATUSES: Mapping[str, str] = MappingProxyType(
    {
        "pass": "all runs gave the same bits",
        "eager_two_runs_differ": "two runs gave different results",
        "eager_1st_run_fail": "the first run raised an error",
        "eager_1st_run_OOM": "the first run ran out of memory",
        "eager_2nd_run_fail": "a later run raised an error",
        "eager_2nd_run_OOM": "a later run ran out of memory",
        "model_fail_to_load": "the model could not be built",
        "eager_fail_to_run": "the model could not be made ready to run",
        "results_not_comparable": "the results cannot be compared",
        "timeout": "it took longer than the time limit",
        "crashed": "its process died",
        "pass_due_to_skip": "it was not run",
    }
)

STANDINGS: Mapping[Standing, str] = MappingProxyType(
    {
        Standing.NEW_DIFFERENCE: "It was fine, and two runs differ now.",
        Standing.BROKEN: "It fails now, and did not before, or failed in another way.",
        Standing.MOVED: "It differed before, and now in another place or for another reason.",
        Standing.MISSING: "It was asked for and left no result: absent is not equal.",
        Standing.NOW_SKIPPED: "It was run before and is skipped now: a difference could hide there.",
        Standing.NOT_COMPARABLE: "It ran under other conditions: whether it got worse is not known.",
        Standing.UNEXPECTED: "Nothing says what to expect of it.",
        Standing.STALE: "What is expected of it has not been seen for a long time: the expectation can go.",
        Standing.FIXED: "It did not pass and passes now.",
        Standing.NOT_SEEN: "It differs now and then, and did not this time: that is not fixed.",
        Standing.MET: "It does what it did before.",
        Standing.NOT_ASKED: "The last night was not asked to run it.",
    }
)

NO_ADVICE: Mapping[Standing, str] = MappingProxyType(
    {
        Standing.NEW_DIFFERENCE: "Sweep it again with more --replays, for a diagnosis.",
        Standing.BROKEN: "Run it again alone (hashbench sweep --only NAME); its log is in the sweep's folder.",
        Standing.MOVED: "Compare both diagnoses; the earlier one stands in the night before.",
        Standing.MISSING: "Look whether the sweep ended, and go on with it: hashbench sweep --resume.",
        Standing.NOW_SKIPPED: "Read the reason, and sweep it again once that is gone.",
        Standing.NOT_COMPARABLE: "Sweep again under the same conditions, or make a new baseline for these.",
        Standing.STALE: "Take it out of the CSV of what is expected.",
    }
)
"""What to do where the row itself holds no advice."""


def letter_of(accuracy: str) -> str:
    """One letter per status, for where there is no room: colour is never the only sign."""
    match verdict_of(accuracy):
        case "absent":
            return ""
        case "pass":
            return "P"
        case "skip":
            return "S"
        case "differ":
            return "D"
    if accuracy.endswith("_OOM"):
        return "M"
    return {"timeout": "T", "crashed": "C"}.get(accuracy, "F")


LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "P": "passes",
        "D": "two runs differ",
        "F": "fails",
        "M": "out of memory",
        "T": "timeout",
        "C": "crashed",
        "S": "skipped",
    }
)
