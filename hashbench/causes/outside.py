"""Rules for what did not come from a kernel: inputs, state, settings, generators, outside values, another sequence.

Pure: imports no torch, reads no files. Each rule answers with a decision or leaves it to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hashbench.catalog import EXPERIMENTS, Place
from hashbench.causes.advice import SEED_IT, decision, removal
from hashbench.causes.evidence import CALL_WORLD, WORLD, all_words, base_of, effect, pick, removes, told, told_of
from hashbench.causes.evidence import with_numbers as _with
from hashbench.causes.stats import Effect
from hashbench.records import Decision, Evidence

Rule = Callable[[Evidence], Decision | None]


def held_still(evidence: Evidence, places: Iterable[Place] = WORLD) -> Decision | None:
    """The cause that belongs to the one thing outside torch that had to be held still."""
    picked = pick(evidence, places)
    return None if picked is None else removal(evidence, EXPERIMENTS[picked[0].name].cause, *picked)


def from_origin(cause: str, sentence: str) -> Rule:
    """A rule for an origin that is a cause in itself, since the trace shows where the difference entered; the arms say
    what removes it."""

    def rule(evidence: Evidence) -> Decision:
        return _shown_by_the_trace(evidence, cause, sentence)

    return rule


def _shown_by_the_trace(evidence: Evidence, cause: str, sentence: str) -> Decision:
    base = evidence.arm("pair", "pair")
    numbers = _remover(evidence) or (told(base=base) if base.differing else "")
    return decision(evidence, cause, "proven", _with(sentence, numbers), named=_named(evidence))


def _generator(evidence: Evidence) -> Decision:
    """A generator's state differs: nobody put it back, or it is seeded from the system's entropy in every run."""
    found = _shown_by_the_trace(evidence, "rng", "a generator's state differs before an op that draws from it")
    seeded_anew = removes(evidence, "entropy", "pair") and not removes(evidence, "generators", "pair")
    return replace(found, advice=SEED_IT) if seeded_anew else found


def _remover(evidence: Evidence) -> str:
    """The numbers of the first arm that removes the difference."""
    removing = next((evidence.arm(*place) for place in WORLD if removes(evidence, *place)), None)
    return "" if removing is None else told(removing, base=base_of(evidence, removing.name, removing.on))


def _named(evidence: Evidence) -> str:
    """The generator, clock or source of entropy that an arm singled out."""
    arms = [evidence.arm(*place) for place in (*CALL_WORLD, *WORLD) if removes(evidence, *place)]
    return next((arm.found for arm in arms if arm.found), "")


def _state(evidence: Evidence) -> Decision:
    """Runs that share a process differ and first runs of fresh processes do not: an earlier run left its mark."""
    fresh, found = evidence.arm("fresh_process", "process"), effect(evidence, "fresh_process", "process")
    if found in (Effect.REMOVED, Effect.SEEMS):
        return removal(evidence, "surviving_state", fresh, "proven" if found is Effect.REMOVED else "likely")
    shown = found is Effect.STAYS and not removes(evidence, "fixed_order", "process")
    numbers = _remover(evidence) or told_of(evidence, ("fresh_process", "process"))
    because = _with("parameters or buffers differ before the first op", numbers)
    return decision(evidence, "initial_state", "proven" if shown else "likely", because, named=_named(evidence))


def _written_behind(evidence: Evidence) -> Decision | None:
    if not evidence.opaque_producer:
        return None
    because = _with("a tensor's content differs from what the last recorded op wrote there", _remover(evidence))
    return decision(evidence, "external_mutation", "proven", because, named=_named(evidence))


def _value_from_outside(evidence: Evidence) -> Decision:
    because = _with("a value from outside torch differs, and no experiment names its source", all_words(evidence))
    return decision(evidence, "outside_value", "open", because)


def _control_flow(evidence: Evidence) -> Decision | None:
    """A value from outside chose the path: it was held still and the paths agree; or, for what it is worth, it was seen
    to differ before they part. Such a value may be a bystander, so an experiment that fixes the order goes first."""
    picked = pick(evidence, WORLD)
    arm, confidence = picked or (None, "")
    if arm is not None and EXPERIMENTS[arm.name].holds_value and (evidence.steered or arm.name != "fresh_process"):
        return removal(evidence, "control_flow", arm, confidence)
    if not evidence.steered or confidence == "proven":
        return None
    because = _with("a value that the program read out differs before the runs part", all_words(evidence))
    return decision(evidence, "control_flow", "likely", because)


def _reordered(evidence: Evidence) -> Decision | None:
    if not evidence.reordered:
        return None
    because = _with("both runs have the same ops, in another order or wired otherwise", all_words(evidence))
    return decision(evidence, "call_order", "likely", because)


OUTSIDE_RULES: dict[str, tuple[Rule, ...]] = {
    "settings": (from_origin("global_settings", "a run changed a global setting of torch"),),
    "input": (from_origin("input_pipeline", "the model's inputs differ before the first op"),),
    "rng": (_generator,),
    "state": (_state,),
    "outside": (_written_behind, held_still, _value_from_outside),
    "sequence": (_control_flow, held_still, _reordered),
}
"""The rules of each origin, in order."""
