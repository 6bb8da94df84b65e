"""What to do about a cause, in one sentence, and what the deterministic algorithms did about it here.

Pure: imports no torch, reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hashbench.causes.evidence import base_of, count, effect, removes, told
from hashbench.causes.rates import deterministic_price
from hashbench.causes.stats import Effect
from hashbench.records import Decision, Evidence, ExperimentResult

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "accumulation_order": (
            "Use a kernel that adds in one order (a deterministic algorithm, or sort by target and sum the "
            "segments), or expect results that differ in their last bits"
        ),
        "write_race": (
            "Give every target one writer: drop duplicate indices, or combine their values before writing "
            "(index_add, scatter_reduce)"
        ),
        "overlapping_views": "Clone what is read before the in-place op: x.add_(x.t().clone()), or write out of place",
        "unordered_output": "Sort what the op returns, or let nothing after it depend on the order",
        "uninitialized_memory": (
            "Write all of the memory before it is read: zeros or full in place of empty, padding filled"
        ),
        "alignment": (
            "Copy the op's inputs into memory that torch allocated, contiguous and from its start, so that every "
            "run takes the same path"
        ),
        "algorithm_selection": (
            "Pin the algorithm: no choice by timing, torch.backends.cudnn.benchmark = False and deterministic = "
            "True, one library version"
        ),
        "contention": (
            "Take time limits and dependence on free resources out of the op, or run it alone on the machine, and "
            "report it to its authors"
        ),
        "rng": "Reset {named} at the start of every run, or draw from torch's default generator, which is reset",
        "outside_value": "Pass {named} in as an argument that is the same in every run",
        "surviving_state": (
            "Keep caches and counters in the module, where a deep copy takes them along, or clear them at the "
            "start of a run"
        ),
        "call_order": (
            "Iterate over lists or sorted keys in place of sets, and join the results of threads in the order "
            "they were started"
        ),
        "control_flow": (
            "Make what chooses the branch the same in every run ({named}), or compute both branches and select "
            "with torch.where"
        ),
        "input_pipeline": "Seed what makes the inputs ({named}), or save them once and load them for every run",
        "initial_state": (
            "Seed what sets parameters and buffers ({named}), or load them from one state_dict for every run"
        ),
        "external_mutation": (
            "Stop writing into a tensor's memory from outside torch ({named}): copy it before sharing it, and "
            "wait for threads that fill it"
        ),
        "global_settings": "Set torch's global settings once before the model runs, and restore what the model changes",
        "opaque_kernel": (
            "Test the operator by itself with the repro: threads of its own, unwritten memory and reads of the "
            "system are what to look for"
        ),
        "opaque_producer": (
            "Find what fills this memory without torch (NumPy, a C extension, another thread) and make it write "
            "the same"
        ),
        "representation": (
            "Compare with torch.equal, for which 0.0 equals -0.0, or add 0.0 to the result; whoever needs the "
            "bits has to find the mechanism"
        ),
        "masked_by_tracing": (
            "Look without a trace: compare results of untraced runs and narrow the model down by halves"
        ),
        "unreproduced": (
            "Run it more often (--runs 20 --replays 200) and under the load of the sweep before it is believed or "
            "dismissed"
        ),
        "unknown": (
            "Give the experiments more time (--diagnose-budget, --replays), and look at the evidence and the repro"
        ),
    }
)
"""One sentence for each cause, without its full stop. ``{named}`` is what an arm singled out."""

SEED_IT = (
    "Seed the generator with a fixed number: here it is seeded from the system's entropy (torch.seed(), "
    "Generator.seed(), a generator made without a seed)."
)
"""What to do about a generator that putting it back does not help, since it is seeded anew in every run."""

_NOBODY = {
    "rng": "the generator that is drawn from",
    "outside_value": "the value",
}
_DEFAULT_NAME = "generator, clock, file or entropy"

_IN_KERNEL = frozenset(
    {
        "accumulation_order",
        "write_race",
        "overlapping_views",
        "unordered_output",
        "alignment",
        "algorithm_selection",
        "contention",
        "opaque_kernel",
        "representation",
        "unknown",
    }
)
"""Causes inside a kernel, where ``use_deterministic_algorithms`` may help."""

_FLAG = "torch.use_deterministic_algorithms(True)"


def decision(evidence: Evidence, cause: str, confidence: str, because: str, *, named: str = "") -> Decision:
    """A decision with the advice that belongs to it; ``named`` is what an arm singled out."""
    name = named or _NOBODY.get(cause, _DEFAULT_NAME)
    clauses = [ADVICE[cause].format(named=name), _deterministic_clause(evidence, cause)]
    return Decision(cause, confidence, because, "; ".join(filter(None, clauses)) + ".")


def removal(evidence: Evidence, cause: str, arm: ExperimentResult, confidence: str) -> Decision:
    """The decision that rests on one arm that removes the difference, or seems to."""
    numbers = told(arm, base=base_of(evidence, arm.name, arm.on))
    caveat = "" if confidence == "proven" else ", which excludes neither luck nor a second mechanism"
    return decision(evidence, cause, confidence, numbers + caveat, named=arm.found)


def _deterministic_clause(evidence: Evidence, cause: str) -> str:
    if cause == "uninitialized_memory":
        filled = removes(evidence, "deterministic_fill", "call") and not removes(evidence, "deterministic", "call")
        return f"{_FLAG} only hides it, by filling fresh memory" if filled else ""
    arm = evidence.arm("deterministic", "call")
    if cause not in _IN_KERNEL:
        return ""
    if arm.note.startswith("raises"):
        return f"{_FLAG} {arm.note}"
    found = effect(evidence, "deterministic", "call")
    if found is Effect.REMOVED:
        price = deterministic_price(evidence)
        return f"{_FLAG} makes it identical here" + (f", at {price:.2g} times the time" if price else "")
    if found is Effect.SEEMS:
        return f"with {_FLAG} {count(arm)} replays differ here, too few to exclude luck"
    return f"with {_FLAG} it still differs here ({count(arm)} replays)" if arm.differing else ""
