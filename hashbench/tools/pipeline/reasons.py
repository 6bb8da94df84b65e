"""Decide from evidence why a stage differs. Pure: imports no torch.

The answer is a cause of :data:`~hashbench.core.catalog.CAUSES`, or one of :data:`DIFFERENCES` between what the two
checks ran; its advice is code. It is ``proven`` where the evidence excludes all others: a generator that was drawn from
and was in a different state before; an experiment with an equal hash seed. It is ``likely`` where the evidence fits it
and something that could exclude the others was not recorded. The names of transforms and samplers decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hashbench.core.catalog import CAUSES, Confidence, Origin
from hashbench.core.diagnose import causes
from hashbench.core.records import Decision, Evidence
from hashbench.tools.pipeline.evidence import StageEvidence
from hashbench.tools.pipeline.observed import LOADER, MAKE_MODEL
from hashbench.tools.pipeline.pairs import Span, united

_CALLS_SHOWN = 3
_GLOBAL = ("python", "numpy", "torch", "cuda")
_GIVEN: Mapping[str, str] = MappingProxyType({"initial weights": "weights", "after transform": "first batches"})
"""The inputs of a model, by the stage that compares them."""

DIFFERENCES: Mapping[str, str] = MappingProxyType(
    {
        "different_files": "# the same data set everywhere: copy it, and compare its checksums",
        "different_arguments": "# the same seed, and the same arguments of the DataLoader, in both",
        "different_content": "# the same data set everywhere: compare checksums before training",
        "different_transforms": "transforms.Compose([...])  # in an order that is written down",
        "different_packages": "pip freeze > requirements.txt  # and install the same versions everywhere",
        "different_model": "# the same code and configuration in both",
        "recorded_once": "# the same kind of loader and dataset in both",
    }
)
"""Reasons that are no causes, since the two checks ran different things; and what to do."""


def decide(evidence: StageEvidence) -> tuple[Decision, ...]:
    """Return what the evidence allows, the likeliest first; never empty, and one alone where it decides."""
    if evidence.one_sided and evidence.stage == "initial weights":
        return (_proven("different_model", "only one of the two pipelines has a model"),)
    if evidence.one_sided:
        return (_likely("recorded_once", "only one of the two checks saw it: whether it differs is not known"),)
    if evidence.arguments and _could_follow(evidence):
        decided = _proven if evidence.whole != LOADER or evidence.drew else _likely
        return (decided("different_arguments", ", ".join(evidence.arguments)),)
    return tuple(_of_hash_seed(evidence)) or _by_stage(evidence)


def _by_stage(evidence: StageEvidence) -> tuple[Decision, ...]:
    """Judge by the stage; where that finds no source, look for a generator that diverged inside some code."""
    decisions = tuple(_RULES.get(evidence.stage, _of_model)(evidence))
    diverged = {span.code: span for span in reversed(evidence.spans) if span.diverged}
    if not diverged or any(decision.confidence != Confidence.OPEN for decision in decisions):
        return decisions
    left = " and ".join(f"{span} left {' and '.join(span.diverged)}" for span in reversed(diverged.values()))
    because = f"{left} in a different state, which was equal before: seeded from entropy, or drawn from more often"
    return (_likely("reseeded", because),)


def _proven(cause: str, because: str) -> Decision:
    return _decision(cause, Confidence.PROVEN, because)


def _likely(cause: str, because: str) -> Decision:
    return _decision(cause, Confidence.LIKELY, because)


def _open(cause: str, because: str) -> Decision:
    return _decision(cause, Confidence.OPEN, because)


def _decision(cause: str, confidence: str, because: str) -> Decision:
    return Decision(cause, str(confidence), because, DIFFERENCES.get(cause) or CAUSES[cause].code)


def _could_follow(evidence: StageEvidence) -> bool:
    """Return True if the user's settings can cause this difference: other indices, or numbers drawn at this stage."""
    if evidence.whole == LOADER:
        return True  # which may make anything of its seed
    if evidence.stage == "order":
        return evidence.order.same_indices is False
    return bool(evidence.drew) and evidence.sample.same_files is not False and not evidence.model.names_differ


def drawn_in_words(spans: Sequence[Span]) -> str:
    """Say which code drew from which generators in a different state.

    Draws that a seeding followed are named only where there are no others.
    """
    found = ("which was in a different state", "which it found in a different state and then seeded")
    for then_seeded, ending in enumerate(found):
        drawn: dict[str, tuple[str, ...]] = {}
        for span in spans:
            names = tuple(name for name in span.drawn if (name in span.seeded) == then_seeded)
            drawn[span.code] = united(drawn.get(span.code, ()), names)
        words = " and ".join(f"{code} drew from {' and '.join(names)}" for code, names in drawn.items() if names)
        if words:
            return f"{words}, {ending}"
    return ""


def _of_hash_seed(evidence: StageEvidence) -> Iterator[Decision]:
    """Check for the effects of the hash seed: the order of sets, and with it perhaps that of imports, or ``hash()``.

    An order that differs is most likely that of a set, unless a generator behind it was in a different state: then its
    seed was made by ``hash()``. Samples that differ in the same order may have either: noise seeded with
    ``hash(name)``, or labels numbered in the order of a set. A call of ``hash`` in the user's code is no proof: it may
    be of a number.
    """
    imported, changed = "the user's modules were imported in a different order", evidence.sample.different_transforms
    if not evidence.hash_order:
        if evidence.imports and (changed or not evidence.drew):
            why = "the transforms differ" if changed else "no generator was drawn from"
            yield _likely("import_order", f"{imported}, and {why}")
        return
    gone = "two runs with the same PYTHONHASHSEED agree, with another they do not"
    calls = f"hash() is called in {', '.join(evidence.hash_calls[:_CALLS_SHOWN])}" if evidence.hash_calls else ""
    by_default = ("torch",) if evidence.order.drawn_by_default else ()
    spans = [names for span in evidence.spans for names in (span.drawn, span.diverged)]
    generators = " and ".join(united(evidence.order.given_moved, by_default, *spans))
    in_order = evidence.stage in ("file list", "order")
    if evidence.imports:
        yield _proven("import_order", f"{imported}; {gone}, so a set decides it")
    elif generators:
        seeded = f"{gone}, and {generators} was in a different state, so its seed follows hash()"
        yield _proven("string_hash", f"{seeded}: {calls}") if calls else _likely("string_hash", seeded)
    elif in_order and not calls:
        yield _proven("set_order", gone)
    elif in_order:
        yield from (_likely("set_order", gone), _likely("string_hash", f"{gone}; {calls}"))
    else:
        if not calls:
            yield _likely("set_order", f"{gone}: names or labels may be numbered in the order of a set")
        where = calls or "if hash() is called, then in a package"
        yield _likely("string_hash", f"{gone}, and the order of the samples is the same; {where}")


def _of_files(_evidence: StageEvidence) -> Iterator[Decision]:
    yield _proven("different_files", "the dataset has files in one check that it lacks in the other")


def _of_order(evidence: StageEvidence) -> Iterator[Decision]:
    return _of_listing(evidence) if evidence.order.same_indices is not False else _of_shuffle(evidence)


def _of_shuffle(evidence: StageEvidence) -> Iterator[Decision]:
    """Decide where the sampler asked for different indices."""
    order, when = evidence.order, "was in a different state when the first batch was asked for"
    # Whatever the sampler does, a loader draws one number from torch's generator.
    others = {span.code: tuple(name for name in span.drew if name != "torch") for span in evidence.here}
    own = [replace(span, drew=others[LOADER]) if span.code == LOADER else span for span in evidence.here]
    drawn = drawn_in_words(own) or drawn_in_words(evidence.here)
    if order.given_moved:
        yield _proven("unseeded_shuffle", f"{' and '.join(order.given_moved)} {when}")
    elif order.drawn_by_default:
        yield _proven("unseeded_shuffle", f"the sampler has no generator of its own, and torch's {when}")
    elif drawn and order.no_generator is None:
        yield _likely("unseeded_shuffle", f"the sampler asked for different indices, and {drawn}")
    else:
        drawing = "no generator that it can have drawn from was in a different state"
        yield _open("outside_value", f"the sampler asked for different indices, and {drawing}")


def _of_listing(evidence: StageEvidence) -> Iterator[Decision]:
    """Decide where the same indices lead to different files."""
    order, drawn = evidence.order, drawn_in_words(evidence.here)
    is_listed = order.listing or order.same_indices
    listed = "the dataset's list is in a different order"
    if is_listed and order.folder:
        yield _proven("unsorted_listing", f"the system lists {order.folder} in a different order, and {listed}")
    elif drawn:
        yield _likely("unseeded_shuffle", f"{listed if is_listed else 'the samples change places'}, and {drawn}")
    elif not is_listed:
        yield _open("outside_value", "samples change places, but neither indices nor a list of files were seen")
    else:
        yield _likely("unsorted_listing", f"the same indices lead to different files: {listed} and not sorted")
        if evidence.hash_order is None:
            yield _likely("set_order", "the hash seeds differ, and no experiment excludes them")


def _of_content(evidence: StageEvidence) -> Iterator[Decision]:
    drawn = drawn_in_words(evidence.earlier)
    if evidence.sample.same_files is False:
        yield _proven("different_content", "files of the same name hold different bytes")
    elif evidence.drawn:
        yield _random("random_dataset", evidence, f"the dataset drew from {' and '.join(evidence.drawn)}")
    elif evidence.packages:
        yield _likely("different_packages", f"equal files were read differently; versions: {evidence.packages}")
    elif drawn:
        yield _likely("unseeded_construction", f"what was read differs, and {drawn}")
    else:
        yield _open("outside_value", "what was read differs, though no generator that was seen was drawn from")


def _of_transforms(evidence: StageEvidence) -> Iterator[Decision]:
    sample, by_loader = evidence.sample, evidence.whole == LOADER
    what = sample.transform or evidence.whole or "the dataset"
    cause = "random_transform" if sample.transform or evidence.whole == "collate_fn" else "random_dataset"
    drawn, earlier = drawn_in_words(evidence.spans), drawn_in_words(evidence.earlier)
    if by_loader and drawn:
        yield _likely("unseeded_loader", drawn)
    elif sample.different_transforms:
        yield _likely("different_transforms", "the samples went through different transforms, or in a different order")
    elif evidence.drawn:
        yield _random(cause, evidence, f"{what} drew from {' and '.join(evidence.drawn)}")
    elif earlier:
        yield _likely("unseeded_construction", f"{what} returned a different result, and {earlier}")
    elif evidence.drew and not by_loader:
        yield _likely(cause, f"{what} drew from {' and '.join(evidence.drew)}, whose state was the same before")
    else:
        drawing = "without drawing from any generator that was seen in a different state"
        yield _open("outside_value", f"{what} returned a different result {drawing}: a clock, os.urandom, uuid, a set")


def _random(cause: str, evidence: StageEvidence, because: str) -> Decision:
    """Find what put the generators that were drawn from into a different state."""
    sample, worker = evidence.sample, f"worker {evidence.sample.worker}"
    by_init = [name for name in evidence.drawn if name in sample.moved_by_init]
    if sample.worker is not None and by_init:
        moves = f"workers begin in the same state, and worker_init_fn moves {' and '.join(by_init)} apart ({worker})"
        return _proven("worker_seeds", f"{because}; {moves}")
    if any(name not in _GLOBAL for name in evidence.drawn):
        return _proven(cause, f"{because}, a generator of its own, which was in a different state")
    if sample.worker is None:
        return _proven(cause, f"{because}, which was in a different state")
    if any(name in sample.moved_at_start for name in evidence.drawn):
        began = "began in a different state, which the loader draws from torch's generator"
        return _proven(cause, f"{because}; {worker} {began}")
    return _likely(cause, f"{because}; {worker} began in the same state, and drew from it before this sample")


def _of_weights(evidence: StageEvidence) -> Iterator[Decision]:
    drawn = drawn_in_words(evidence.here)
    if evidence.model.names_differ:
        yield _proven("different_model", "the models have different parameters")
    elif any(span.code == MAKE_MODEL and set(span.drawn) - set(span.seeded) for span in evidence.here):
        yield _proven("initial_state", drawn)
    elif drawn:
        yield _likely("initial_state", drawn)
    else:
        yield _open("initial_state", "no generator that was seen was in a different state: a checkpoint, or entropy")


def _of_model(evidence: StageEvidence) -> Iterator[Decision]:
    """Decide as for a model: the first divergence of the traces shows where the difference entered."""
    model, found = evidence.model, evidence.model.divergence
    given = [what for stage, what in _GIVEN.items() if stage not in model.unseen]
    equal = f"{' and '.join(given)} are equal" if given else "what the model was given was not seen"
    if model.unseen and given:
        equal += f" ({' and '.join(model.unseen)} was not seen)"
    if found is not None and found.origin in (Origin.INPUT, Origin.STATE):
        what = "input" if found.origin == Origin.INPUT else "parameters or buffers"
        changed = f"{found.kernel or found.node} got different {what}: something changed them before the model ran"
        yield _likely("modified_later", f"{equal}, and {changed}")
        return
    where, shown = "the model's results are not", Evidence(origin="")
    if found is not None:
        where = f"{found.kernel or found.node} ({found.origin}): {found.detail}"
        shown = Evidence(found.origin, found.opaque_producer, steered=found.steered_by is not None)
    decided = causes.decide(shown)
    if decided.confidence == Confidence.OPEN and evidence.packages:
        yield _likely("different_packages", f"{equal}; {evidence.packages}; {where}")
    else:
        yield _decision(decided.cause, decided.confidence, f"{equal}; {where}")


_RULES: Mapping[str, Callable[[StageEvidence], Iterator[Decision]]] = MappingProxyType(
    {
        "file list": _of_files,
        "order": _of_order,
        "before transform": _of_content,
        "after transform": _of_transforms,
        "initial weights": _of_weights,
    }
)
"""How each stage is judged; every other one as a result of the model."""
