"""Rules that find a cause: for origins outside kernels, for a kernel whose outputs differ from equal inputs, and for a
difference that did not come again. Each rule returns a decision, or ``None`` to leave it to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hashbench.core.catalog import EXPERIMENTS, Confidence, Limit, Origin, Place, Role, places
from hashbench.core.diagnose.causes.evidence import (
    CALL_CONTROLS,
    MODEL_CONTROLS,
    all_words,
    base_of,
    counted,
    cut_short,
    decision,
    effect,
    few_outcomes,
    in_words,
    in_words_of,
    pick,
    removal,
    removes,
)
from hashbench.core.diagnose.causes.stats import Effect, effect_of, fewer, is_rare, sure_count
from hashbench.core.records import REPLICAS_BY, SEEDED, UNREDUCED, CallFacts, Decision, Evidence, ExperimentResult
from hashbench.core.text import count

Rule = Callable[[Evidence], Decision | None]

_HASHED = "what follows string hashes or addresses (hash(), id(), data_ptr(), the order of a set)"
"""A value that is the same where these are."""

PROVEN, LIKELY, OPEN = Confidence.PROVEN, Confidence.LIKELY, Confidence.OPEN

_ORDERING: tuple[Place, ...] = (("one_thread", "call"), ("one_worker", "call"), ("deterministic", "call"))
_TUNED = "cudnn_benchmark"
_LIBRARIES = places(
    experiment for experiment in EXPERIMENTS.values() if experiment.role is Role.LIBRARY and experiment.name != _TUNED
)
_DISTURBING = tuple(
    experiment for experiment in EXPERIMENTS.values() if experiment.role is Role.DISTURB and experiment.cause
)


def _with(sentence: str, numbers: str) -> str:
    """Append the numbers to a sentence, if there are any."""
    return f"{sentence}: {numbers}" if numbers else sentence


def _left(evidence: Evidence, cause: str, confidence: Confidence, sentence: str) -> Decision:
    """Return a decision that rests on no single experiment: it lists the whole evidence."""
    return decision(evidence, cause, confidence, _with(sentence, all_words(evidence)))


def _by_looks(evidence: Evidence, cause: str, sentence: str, *, sure: bool) -> Decision:
    """Return a decision that rests on the pattern of the outcomes, with the effect of integer inputs and of a fixed
    order."""
    numbers = in_words_of(evidence, ("exact_values", "call"), *_ORDERING)
    return decision(evidence, cause, PROVEN if sure else LIKELY, f"{sentence}{numbers}")


# --------------------------------------------------------------------- inputs, state, settings, generators, sequence


def _shown_by_the_trace(evidence: Evidence, *, cause: str, sentence: str) -> Decision:
    """Return a decision that rests on the origin: the trace shows where the difference entered, experiments what
    removes it."""
    base = evidence.arm("pair", "pair")
    numbers = _removal_in_words(evidence) or (in_words(base=base) if base.differing else "")
    return decision(evidence, cause, PROVEN, _with(sentence, numbers), named=_singled_out(evidence))


def _generator(evidence: Evidence) -> Decision:
    """Return ``rng``: a generator was not reset, or is seeded from the system's entropy in every run.

    ``likely`` if restoring all generators does not help and nothing else explains it: what moves it is not known.
    """
    sentence = "a generator's state differs before an op that draws from it"
    shown = _shown_by_the_trace(evidence, cause="rng", sentence=sentence)
    unexplained = evidence.arm("generators", "pair").differing and not _source_removes(evidence)
    return replace(shown, confidence=str(LIKELY)) if unexplained else shown


_SOURCES = tuple((name, "pair") for name in ("generators", "entropy", "clocks"))
"""Experiments that hold the source of a value constant."""


def _source_removes(evidence: Evidence) -> bool:
    """Return True if holding a generator, entropy or a clock constant removes the difference."""
    return any(removes(evidence, *place) for place in _SOURCES)


def _unless_drawn(rule: Rule) -> Rule:
    """Skip the rule if a generator, entropy or a clock explains the difference, or still may.

    It may where generators differ and were not restored yet.
    """

    def guarded(evidence: Evidence) -> Decision | None:
        open_still = evidence.origin == Origin.RNG and not evidence.arm("generators", "pair").differing
        return None if open_still or _source_removes(evidence) else rule(evidence)

    return guarded


def _joined(evidence: Evidence) -> Decision | None:
    """Return ``call_order`` if running threads one at a time removes the difference: completion order varies."""
    if not removes(evidence, "one_worker", "pair"):
        return None
    return removal(evidence, "call_order", evidence.arm("one_worker", "pair"), PROVEN)


def _survived(evidence: Evidence) -> Decision | None:
    """Return ``surviving_state`` if runs in one process differ and first runs of fresh processes do not."""
    fresh, known = evidence.arm("fresh_process", "process"), effect(evidence, "fresh_process", "process")
    if known not in (Effect.REMOVED, Effect.SEEMS):
        return None
    return removal(evidence, "surviving_state", fresh, PROVEN if known is Effect.REMOVED else LIKELY)


def _inputs(evidence: Evidence) -> Decision:
    """Return ``input_pipeline``; proven if an experiment names the source or fresh processes differ too."""
    sentence = "the model's inputs differ before the first op"
    shown = _shown_by_the_trace(evidence, cause="input_pipeline", sentence=sentence)
    stays = effect(evidence, "fresh_process", "process") is Effect.STAYS
    return shown if stays or _source_removes(evidence) else replace(shown, confidence=str(LIKELY))


def _removal_in_words(evidence: Evidence) -> str:
    """Format the first experiment that removes the difference."""
    return next((in_words_of(evidence, place) for place in MODEL_CONTROLS if removes(evidence, *place)), "")


def _singled_out(evidence: Evidence) -> str:
    """Return the generator, clock or source of entropy that an experiment named, or ``""``."""
    removing = [evidence.arm(*place) for place in (*CALL_CONTROLS, *MODEL_CONTROLS) if removes(evidence, *place)]
    return next((result.found for result in removing if result.found), "")


def _state(evidence: Evidence) -> Decision:
    stays = effect(evidence, "fresh_process", "process") is Effect.STAYS
    shown = stays and not removes(evidence, "fixed_order", "process")
    numbers = _removal_in_words(evidence) or in_words_of(evidence, ("fresh_process", "process"))
    because = _with("parameters or buffers differ before the first op", numbers)
    return decision(evidence, "initial_state", PROVEN if shown else LIKELY, because, named=_singled_out(evidence))


def _collected(evidence: Evidence) -> Decision | None:
    """Return ``garbage_collection`` if the difference is gone without the collector."""
    if not removes(evidence, "no_collector", "pair"):
        return None
    return removal(evidence, "garbage_collection", evidence.arm("no_collector", "pair"), PROVEN)


def _written_behind(evidence: Evidence) -> Decision | None:
    if not evidence.opaque_producer:
        return None
    sentence, named = "a tensor's content differs from what the last recorded op wrote there", _singled_out(evidence)
    if not named and removes(evidence, "one_worker", "pair"):
        sentence, named = f"{sentence}, which threads of the model do", "threads of the model"
    return decision(evidence, "external_mutation", PROVEN, _with(sentence, _removal_in_words(evidence)), named=named)


def _written_beside(evidence: Evidence) -> Decision | None:
    """Return ``external_mutation``: an unjoined thread writes to a tensor a varying number of times."""
    sentence = "a thread of the model writes into a tensor more often in one run than in the other"
    if not evidence.opaque_producer:
        return None
    return decision(evidence, "external_mutation", PROVEN, sentence, named="threads of the model")


def _held_still(evidence: Evidence, places: tuple[Place, ...] = MODEL_CONTROLS) -> Decision | None:
    """Return the cause of the one thing outside torch that had to be held constant."""
    picked = pick(evidence, places)
    return None if picked is None else removal(evidence, EXPERIMENTS[picked[0].name].cause, *picked)


def _hashed(evidence: Evidence) -> Decision | None:
    """Return ``outside_value`` if only fixed hash seeds and addresses help: ops and order agree, a derived value
    differs."""
    picked = pick(evidence, MODEL_CONTROLS)
    if picked is None or picked[0].name != "fixed_order":
        return None
    because = removal(evidence, "outside_value", *picked).because
    return decision(evidence, "outside_value", picked[1], because, named=_HASHED)


def _value_from_outside(evidence: Evidence) -> Decision:
    sentence = "a value from outside torch differs, and no experiment names its source"
    return _left(evidence, "outside_value", OPEN, sentence)


def _control_flow(evidence: Evidence) -> Decision | None:
    """Return ``control_flow`` if holding an outside value constant makes the paths agree, or a scalar differed before
    they diverge.

    Such a scalar may be a bystander, so an experiment that fixes the order takes precedence.
    """
    picked = pick(evidence, MODEL_CONTROLS)
    result, confidence = picked or (None, OPEN)
    chooses = result is not None and (evidence.steered or result.name != "fresh_process")
    if chooses and result is not None and EXPERIMENTS[result.name].holds_value:
        return removal(evidence, "control_flow", result, confidence)
    if not evidence.steered or confidence is PROVEN:
        return None
    return _left(evidence, "control_flow", LIKELY, "a value that the program read out differs before the runs diverge")


def _other_ranks(evidence: Evidence) -> Decision:
    """Return ``other_ranks``: the trace of a rank is missing, so that no experiment is made."""
    return decision(evidence, "other_ranks", OPEN, "the runs diverge in, or behind, what a collective received")


_SETTINGS_OF_COLLECTIVES = places(
    (experiment for experiment in EXPERIMENTS.values() if experiment.role is Role.LIBRARY), "collective"
)


def _arrival_order(evidence: Evidence) -> Decision:
    """Return ``arrival_order`` for a collective whose contributions agree and whose output differs.

    Proven if a fixed source removes the difference, or the collective alone differs with equal contributions.
    """
    repeated = evidence.arm("contributions", "collective")
    if removes(evidence, "fixed_source", "pair"):
        return removal(evidence, "arrival_order", evidence.arm("fixed_source", "pair"), PROVEN)
    if repeated.differing:
        numbers = in_words_of(evidence, *_SETTINGS_OF_COLLECTIVES)
        return decision(evidence, "arrival_order", PROVEN, numbers)
    sentence = "a collective gives other data, and every rank contributed the same"
    return _left(evidence, "arrival_order", LIKELY, sentence)


def _unwaited(evidence: Evidence) -> Decision:
    """Return ``unwaited_read``: the content of what was read changed until the collective was done."""
    return decision(evidence, "unwaited_read", PROVEN, "what was read before the Work was done changed until it was")


def _replicas(evidence: Evidence) -> Decision:
    """Return why replicas differ between ranks: the traces show it, no experiment is needed."""
    sentence = f"{evidence.parameter} differs between ranks: {REPLICAS_BY[evidence.replicas]}"
    cause = {UNREDUCED: "unreduced_replica", SEEDED: "rank_seed"}.get(evidence.replicas)
    if cause is None:
        return _left(evidence, "unknown", OPEN, sentence)
    return decision(evidence, cause, PROVEN, sentence, named=evidence.parameter)


def _reordered(evidence: Evidence) -> Decision | None:
    sentence = "both runs have the same ops, in a different order or wired differently"
    return _left(evidence, "call_order", LIKELY, sentence) if evidence.reordered else None


# ------------------------------------------------------------------------------------------ inside the call


def _facts(evidence: Evidence) -> CallFacts:
    return evidence.call or CallFacts("")


def _repeat_differs(evidence: Evidence) -> bool:
    """Return True if the captured call gives several outcomes with its memory, content and random state restored in
    place."""
    return evidence.arm("repeat", "call").differing > 0


def _uninitialized(evidence: Evidence) -> Decision | None:
    """Return ``uninitialized_memory`` if outputs follow the poison in fresh memory: an observation, no test of chance
    needed."""
    on = "pair" if _facts(evidence).allocation else "call"
    poison = evidence.arm("poison", on)
    if poison.differing:
        return decision(evidence, "uninitialized_memory", PROVEN, in_words(poison))
    if not _facts(evidence).allocation:
        return None
    if poison.ran:
        because = (
            f"results do not follow what fresh memory holds: it was filled outside the dispatcher: {in_words(poison)}"
        )
        return decision(evidence, "opaque_producer", LIKELY, because)
    because = _with("memory was read that no recorded op had written", in_words(base=evidence.arm("pair", "pair")))
    return decision(evidence, "uninitialized_memory", LIKELY, because)


def _follows_fresh_memory(evidence: Evidence) -> Decision | None:
    """Return ``uninitialized_memory`` if the results of whole runs follow the poison in fresh memory."""
    poison = evidence.arm("poison", "pair")
    return decision(evidence, "uninitialized_memory", PROVEN, in_words(poison)) if poison.differing else None


def _drawn_inside(evidence: Evidence) -> Decision | None:
    """Return the cause of a generator, entropy or clock inside the op, before the pattern of its outputs is considered:
    noise may select values or places.

    Not where one thread or one worker removes the difference too: holding the value constant may only have steadied the
    threads, and the pattern decides.
    """
    if any(removes(evidence, *place) for place in _ORDERING[:2]):
        return None
    picked = pick(evidence, CALL_CONTROLS)
    if picked is None or picked[1] is not PROVEN:
        return None
    return _held_still_or_timed(evidence, places=CALL_CONTROLS)


def _overlapping(evidence: Evidence) -> Decision | None:
    if not _facts(evidence).overlap or not _repeat_differs(evidence):
        return None
    known = effect(evidence, "copied_sources", "call")
    numbers = in_words_of(evidence, ("copied_sources", "call"), ("one_thread", "call"))
    if known is Effect.REMOVED:
        return decision(evidence, "overlapping_views", PROVEN, numbers)
    if Effect.STAYS in (known, effect(evidence, "one_thread", "call")):
        return None
    because = f"the op writes memory that it reads through another view: {numbers}"
    return decision(evidence, "overlapping_views", LIKELY, because)


def _unordered(evidence: Evidence) -> Decision | None:
    """Return ``unordered_output`` if places differ and the values are the same.

    ``likely`` where integer inputs remove it: values matter after all, and a few sums may have traded places by chance.
    """
    if not _facts(evidence).same_values or not _repeat_differs(evidence):
        return None
    sentence = "outcomes that differ hold the same values in different places: "
    return _by_looks(evidence, "unordered_output", sentence, sure=not removes(evidence, "exact_values"))


def _tied(evidence: Evidence) -> Decision | None:
    """Return ``unordered_output`` if indices differ and point to equal values: the choice among ties is unspecified.

    Integer inputs have more ties, so the difference has to stay under them.
    """
    if not _facts(evidence).tied_places or not _repeat_differs(evidence):
        return None
    sure = effect(evidence, "exact_values", "call") in (Effect.STAYS, Effect.LOWERED)
    return _by_looks(evidence, "unordered_output", "outcomes differ in places that hold equal values: ", sure=sure)


def _race(evidence: Evidence) -> Decision | None:
    """Return ``write_race`` if every differing element is some input's value: the last writer won.

    Sums in 16 bits hit such a value by chance, so the difference must remain with integer inputs.
    """
    if not _facts(evidence).chosen_values or not _repeat_differs(evidence):
        return None
    exact, ordered = effect(evidence, "exact_values", "call"), _ordered(evidence)
    if exact is Effect.REMOVED or ordered is Effect.STAYS:
        return None
    sure = exact in (Effect.STAYS, Effect.LOWERED) and ordered is Effect.REMOVED
    sentence = "wherever outcomes differ, each holds a value of one of the inputs: "
    return _by_looks(evidence, "write_race", sentence, sure=sure)


def _accumulation(evidence: Evidence) -> Decision | None:
    """Return ``accumulation_order`` if two experiments agree: integer inputs show that rounding differs, a fixed order
    of work that the order decides it. The deterministic flag alone may also have chosen another algorithm."""
    exact, ordered = effect(evidence, "exact_values", "call"), _ordered(evidence)
    jointly = exact is Effect.SEEMS is ordered and _remove_together(evidence)
    if not jointly and Effect.REMOVED not in (exact, ordered):
        return None
    if Effect.STAYS in (exact, ordered) or exact is Effect.LOWERED:
        return None
    by_flag_alone = not any(removes(evidence, *place) for place in _ORDERING[:2])
    rival = by_flag_alone and any(removes(evidence, *place) for place in _LIBRARIES)
    return _by_looks(evidence, "accumulation_order", "", sure=exact is ordered and not rival and not jointly)


def _remove_together(evidence: Evidence) -> bool:
    """Return True if chance does not explain that neither integer inputs nor a fixed order show any difference, though
    each has too few trials by itself: a common outcome often agrees with itself."""
    exact = evidence.arm("exact_values", "call")
    orders = [evidence.arm(*place) for place in _ORDERING if effect(evidence, *place) is Effect.SEEMS]
    both = replace(exact, trials=sum(result.trials for result in (exact, *orders)))
    return effect_of(base_of(evidence, exact.name, "call"), both) is Effect.REMOVED


def _ordered(evidence: Evidence) -> Effect:
    """Return the effect of fixing the order of work: by one thread, one worker, or the deterministic kernel.

    A kernel that does not run on CPU threads has no ``one_thread`` result, and then nothing here excludes an order.
    """
    effects = [effect(evidence, *place) for place in _ORDERING]
    known = (Effect.REMOVED, Effect.SEEMS, Effect.LOWERED)
    return next((decisive for decisive in known if decisive in effects), effects[0])


def _address_or_load(evidence: Evidence) -> Decision | None:
    """Return ``alignment`` or ``contention`` for a call that agrees in place and alone, rare exceptions aside, but not
    at another address or under load."""
    repeat = evidence.arm("repeat", "call")
    if not repeat.ran or not is_rare(repeat):
        return None
    differing = [result for experiment in _DISTURBING if (result := evidence.arm(experiment.name, "call")).differing]
    sure = [result for result in differing if _more(result, repeat)]
    if repeat.differing and not sure:
        return None
    if differing:
        result = (sure or differing)[0]
        confidence = PROVEN if sure else LIKELY
        return decision(evidence, EXPERIMENTS[result.name].cause, confidence, in_words(result, base=repeat))
    # Inputs in new memory change the outcome; what that memory held before does not. Their address is left.
    fresh, poison = evidence.arm("fresh_memory", "call"), evidence.arm("poison", "call")
    if not poison.ran or not _more(fresh, repeat):
        return None
    return decision(evidence, "alignment", LIKELY, in_words(fresh, poison, base=repeat))


def _more(result: ExperimentResult, base: ExperimentResult) -> bool:
    """Return True if an experiment differs more often than its baseline, by more than chance explains."""
    return fewer((result.differing, result.trials), (base.differing, base.trials))


def _held_still_or_timed(evidence: Evidence, *, places: tuple[Place, ...]) -> Decision | None:
    """Return the cause of what was held constant; a clock inside an op either selects the algorithm, an effect that
    integer inputs hide, or enters the result."""
    picked = pick(evidence, places)
    if picked is None or picked[0].name != "clocks":
        return _held_still(evidence, places)
    clocks, confidence = picked
    base = base_of(evidence, clocks.name, clocks.on)
    if removes(evidence, "exact_values"):
        numbers = in_words(clocks, evidence.arm("exact_values", "call"), base=base)
        sure = confidence is PROVEN and few_outcomes(base)
        return decision(evidence, "algorithm_selection", PROVEN if sure else LIKELY, numbers)
    if few_outcomes(base):
        because = f"{base.distinct} outcomes come again: {in_words(clocks, base=base)}"
        return decision(evidence, "algorithm_selection", LIKELY, because)
    return removal(evidence, "outside_value", clocks, confidence)


def _library(evidence: Evidence) -> Decision | None:
    """Return ``algorithm_selection``, at most likely, if another library or algorithm agrees, or autotuning differs
    more.

    Neither shows that the choice varies: the chosen algorithm may itself differ.
    """
    base, tuned = evidence.arm("repeat", "call"), evidence.arm(_TUNED, "call")
    if tuned.differing and fewer(sure_count(tuned), (base.differing, base.trials)):
        return decision(evidence, "algorithm_selection", LIKELY, in_words(tuned, base=base))
    picked = pick(evidence, _LIBRARIES)
    return None if picked is None else removal(evidence, "algorithm_selection", picked[0], LIKELY)


def _capped(rule: Rule) -> Rule:
    """Lower ``proven`` to ``likely`` if no replay gave the recorded outcome: replays may show another mechanism.

    Not where every replay gives a new outcome: the recorded one is then not to be expected among them.
    """

    def capped(evidence: Evidence) -> Decision | None:
        decided = rule(evidence)
        repeat = evidence.arm("repeat", "call")
        expected = not repeat.differing or few_outcomes(repeat)
        if decided is None or decided.confidence != PROVEN:
            return decided
        if not expected or _facts(evidence).matches_record is not False:
            return decided
        because = f"{decided.because}; but no replay gave what the trace had recorded"
        return replace(decided, confidence=str(LIKELY), because=because)

    return capped


# ----------------------------------------------------------------------------------------- around the call


def _held_still_around(evidence: Evidence) -> Decision | None:
    """Return the cause of what was held constant in runs of the model.

    Not for one of torch's own kernels that differs in place with all inputs restored: its surroundings cannot explain
    that.
    """
    if _repeat_differs(evidence) and not _facts(evidence).custom:
        return None
    return _held_still_or_timed(evidence, places=MODEL_CONTROLS)


def _follows_fresh_memory_around(evidence: Evidence) -> Decision | None:
    """Apply :func:`_follows_fresh_memory`, unless the kernel differs in place with all its inputs restored."""
    return None if _repeat_differs(evidence) else _follows_fresh_memory(evidence)


def _representation(evidence: Evidence) -> Decision | None:
    """Return ``representation`` where no mechanism is named; proven once the last experiment, in fresh processes, was
    run."""
    word = _facts(evidence).representation or evidence.representation
    if not word:
        return None
    tried = evidence.arm("fresh_process", "process").ran
    sentence = f"values are equal and only the bits differ ({word}); what makes them differ stays open"
    return _left(evidence, "representation", PROVEN if tried else LIKELY, sentence)


def _opaque_producer(evidence: Evidence) -> Decision | None:
    sentence = "a view or copy differs, so what it read was modified outside the dispatcher"
    return _left(evidence, "opaque_producer", LIKELY, sentence) if evidence.opaque_producer else None


def _opaque_kernel(evidence: Evidence) -> Decision | None:
    if not _facts(evidence).custom:
        return None
    seen = any(result.differing for result in evidence.arms)
    sentence = "an op that torch does not define differs from equal inputs, and no experiment explains it"
    because = _with(sentence, all_words(evidence) or "none was made")
    return decision(evidence, "opaque_kernel", LIKELY if seen else OPEN, because)


_INSIDE: tuple[Rule, ...] = (
    _drawn_inside,
    _overlapping,
    _unordered,
    _tied,
    _race,
    _accumulation,
    _address_or_load,
    partial(_held_still_or_timed, places=CALL_CONTROLS),
    _library,
)

RULES: dict[str, tuple[Rule, ...]] = {
    Origin.SETTINGS: (
        partial(_shown_by_the_trace, cause="global_settings", sentence="a run changed a global setting of torch"),
    ),
    Origin.INPUT: (_follows_fresh_memory, _collected, *map(_unless_drawn, (_joined, _survived, _hashed)), _inputs),
    Origin.RNG: (*map(_unless_drawn, (_follows_fresh_memory, _collected, _joined, _survived, _hashed)), _generator),
    Origin.STATE: (_follows_fresh_memory, _collected, _unless_drawn(_joined), _survived, _state),
    Origin.OUTSIDE: (_follows_fresh_memory, _written_behind, _hashed, _held_still, _value_from_outside),
    Origin.SEQUENCE: (_follows_fresh_memory, _control_flow, _held_still, _written_beside, _reordered),
    Origin.RANKS: (_other_ranks,),
    Origin.COLLECTIVE: (_arrival_order,),
    Origin.UNWAITED: (_unwaited,),
    Origin.KERNEL: (
        _uninitialized,  # memory that follows the poison matches no record, so that is no argument against it
        *map(_capped, _INSIDE),
        _follows_fresh_memory_around,
        _held_still_around,
        _representation,
        _opaque_producer,
        _opaque_kernel,
    ),
}
"""The rules of each origin, in order."""


# --------------------------------------------------------------------------------------------- what was not seen again

_AGAIN = places((experiment for experiment in EXPERIMENTS.values() if experiment.role is Role.BASE), "pair", "process")
"""Experiments that run the model again unchanged."""

_STEADYING = frozenset(experiment.name for experiment in EXPERIMENTS.values() if experiment.role is Role.STEADY)
"""Experiments that hold one thing constant: they can remove a difference but not cause one. Where they differ and
unchanged runs do not, they are no more than further runs."""

_REPRODUCES_NOTHING = frozenset(
    experiment.name for experiment in EXPERIMENTS.values() if experiment.role in (Role.FLAG, Role.LIBRARY, Role.PROCESS)
)
"""Experiments that may differ where the sweep's runs agree: they run another kernel than the sweep did, or compare
different processes, whose hash seeds differ."""


def _masked_by_tracing(evidence: Evidence) -> Decision | None:
    if evidence.untraced != "differ" or evidence.first_pair[0]:
        return None
    traced, untraced = evidence.arm("pair", "pair"), evidence.arm("untraced", "pair")
    if untraced.ran and not untraced.differing:
        return None  # the untraced difference did not come again
    sure = fewer(sure_count(untraced), (traced.differing, traced.trials))
    if traced.differing and not sure:
        return None  # a rare difference that traced runs show too
    compared = evidence.first_pair[1]
    numbers = in_words(traced, base=untraced) or f"an untraced pair of runs differs; 0 of {compared} traced ones"
    return decision(evidence, "masked_by_tracing", PROVEN if sure else LIKELY, numbers)


def _unreproduced(evidence: Evidence) -> Decision | None:
    """Return ``unreproduced`` if the model, run again unchanged, agrees, and so does every replay.

    Replays alone are not enough: they leave out what the model did before the call. A changed setting is restored
    before the next run, so further runs agree.
    """
    if evidence.origin == Origin.SETTINGS or not any(evidence.arm(*place).ran for place in _AGAIN):
        return None
    repeated = [result for result in evidence.arms if result.ran and result.name not in _REPRODUCES_NOTHING]
    differing, compared = evidence.first_pair
    strays = [result for result in repeated if result.differing]
    if any(not _is_stray(evidence, result) for result in strays) or not (differing or evidence.untraced == "differ"):
        return None
    if any(_more_than_luck(repeated, on) for on in ("call", "pair")):
        return None
    seen = (
        f"{differing} of {count(compared, 'run')} of the sweep differed" if differing else "an untraced pair differed"
    )
    then = "hardly any did, too few to say what removes it" if strays else "nothing did"
    because = f"{seen} from the first, then {then}: {', '.join(map(counted, repeated))}"
    fresh = evidence.arm("fresh_process", "process")
    because += f"; {counted(fresh)} differ from each other" if fresh.differing else ""
    return decision(evidence, "unreproduced", OPEN, because)


def _is_stray(evidence: Evidence, result: ExperimentResult) -> bool:
    """Return True if a differing result held something constant, and its baseline was run and never differed."""
    base = base_of(evidence, result.name, result.on)
    return result.name in _STEADYING and base.ran and not base.differing


def _more_than_luck(repeated: Sequence[ExperimentResult], on: str) -> bool:
    """Return True if experiments that hold something constant differ more often than unchanged runs, taken together."""
    steadied = [result for result in repeated if result.on == on and result.name in _STEADYING and result.differing]
    plain = [result for result in repeated if result.on == on and result.name in ("repeat", "pair")]
    return bool(steadied) and fewer(_total(steadied), _total(plain))


def _total(results: Sequence[ExperimentResult]) -> tuple[int, int]:
    return sum(result.differing for result in results), sum(result.trials for result in results)


def _unless_nothing_ran(evidence: Evidence, decided: Decision) -> Decision:
    """Lower ``proven`` to ``likely`` if every experiment was tried and none could be run."""
    if decided.confidence != PROVEN or not evidence.arms or any(result.ran for result in evidence.arms):
        return decided
    because = f"{decided.because}; no experiment could be made: {all_words(evidence)}"
    return replace(decided, confidence=str(LIKELY), because=because)


def _saying_what_lacked_time(evidence: Evidence, decided: Decision) -> Decision:
    limited = ", ".join(result.place for result in cut_short(evidence.arms, decided.confidence))
    if not limited:
        return decided
    return replace(decided, because=f"{decided.because}; {Limit.BUDGET.meaning} before these were complete: {limited}")


def decide(evidence: Evidence) -> Decision:
    """Return the cause that the evidence shows; unless it is proven, name the experiments that ran out of time."""
    return _saying_what_lacked_time(evidence, _decided(evidence))


def _decided(evidence: Evidence) -> Decision:
    """Return the decision of the first rule that applies: cause, confidence, numbers and advice.

    ``docs/causes.md`` explains causes and experiments; ``tests/core/diagnose/causes`` is the truth table.
    """
    if evidence.replicas:
        return _replicas(evidence)
    for rule in (_masked_by_tracing, _unreproduced, *RULES.get(evidence.origin, ())):
        decided = rule(evidence)
        if decided is not None:
            return _unless_nothing_ran(evidence, decided)
    limits = evidence.call.limits if evidence.call is not None else ""
    because = f"no mechanism explains all of this: {all_words(evidence) or 'no experiment was made'}"
    because += f"; the call was not captured: {limits}" if limits else ""
    return decision(evidence, "unknown", OPEN, because)
