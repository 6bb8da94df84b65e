"""Decide from evidence why a stage differs, and give the fix as code. Pure: imports no torch.

A reason is ``proven`` where the evidence excludes all others: a generator that was drawn from and was in another state
before; an experiment with an equal hash seed. It is ``likely`` where the evidence fits it and something that could
exclude the others was not recorded. The names of transforms and samplers decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hashbench.core.catalog import Origin
from hashbench.tools.pipeline.observed import LOADER, MAKE_MODEL

_CALLS_SHOWN = 3
_NO_CALLS = "if hash() is called, then in a package"

GLOBAL = ("python", "numpy", "torch", "cuda")
_GIVEN: Mapping[str, str] = MappingProxyType({"initial weights": "weights", "after transform": "first batches"})
"""The inputs of a model, by the stage that compares them."""


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """Draws from generators whose states differed before.

    Attributes:
        span: one of :data:`~hashbench.tools.pipeline.observed.SPANS`, or the code that made the batches.
        generators: their names.
        seeded: they were in the same state afterwards, so that draws before the seeding cannot be distinguished from
            none.
    """

    span: str
    generators: tuple[str, ...]
    seeded: bool = False

    def without(self, generators: Container[str]) -> RandomDraw:
        """Return a copy without some of the generators."""
        return replace(self, generators=tuple(name for name in self.generators if name not in generators))


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """What is known of an order that differs.

    Attributes:
        same_indices: the sampler asked for the same indices.
        listing: the dataset's own list is in another order.
        folder: a folder that the system lists in another order in each check.
        no_generator: a shuffling sampler of torch was passed no generator.
        given_moved: generators of the loader or sampler that were in another state.
    """

    same_indices: bool | None = None
    listing: bool = False
    folder: str = ""
    no_generator: bool | None = None
    given_moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What is known of the first sample that differs.

    Attributes:
        transform: the first whose output differs though its input does not.
        other_transforms: the transforms themselves differ.
        same_files: the files' bytes are equal.
        worker: the process that made the sample.
        moved_at_start: generators in another state when the worker began.
        moved_by_init: those that only ``worker_init_fn`` moved apart.
    """

    transform: str = ""
    other_transforms: bool = False
    same_files: bool | None = None
    worker: int | None = None
    moved_at_start: tuple[str, ...] = ()
    moved_by_init: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model whose weights or results differ.

    Attributes:
        names_differ: other names or shapes of parameters.
        unseen: earlier stages that neither check recorded.
        origin: of the traces' first divergence.
        kernel: of the traces' first divergence.
    """

    names_differ: bool = False
    unseen: tuple[str, ...] = ()
    origin: str = ""
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """The facts about a stage that differs; ``None`` and empty mean not known.

    Attributes:
        stage: its name.
        one_sided: only one check recorded the stage.
        asked_otherwise: the seeds, or for batches the arguments of the loaders, that differ, in words.
        imports: the user's modules were imported in another order.
        hash_order: gone with an equal hash seed (``False``: stays).
        packages: versions that differ.
        whole: the code that made the batch that differs, where its samples were not recorded or are equal.
        draws: draws from generators in another state, where the difference may originate, the likeliest first.
        drew: generators drawn from where the difference entered.
        moved: generators in another state before they were drawn from here.
        parted: code that found generators in the same state and left them in another one, where the difference may
            originate.
        hash_calls: lines of the user's modules that call ``hash``.
        order, sample, model: what is known of this kind of stage alone.
    """

    stage: str
    one_sided: bool = False
    asked_otherwise: tuple[str, ...] = ()
    imports: bool = False
    hash_order: bool | None = None
    packages: str = ""
    whole: str = ""
    draws: tuple[RandomDraw, ...] = ()
    drew: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    parted: tuple[RandomDraw, ...] = ()
    hash_calls: tuple[str, ...] = ()
    order: OrderFacts = OrderFacts()
    sample: SampleFacts = SampleFacts()
    model: ModelFacts = ModelFacts()

    @property
    def drawn(self) -> str:
        """The generators that were drawn from and were in another state before, in words."""
        return " and ".join(name for name in self.drew if name in self.moved)

    @property
    def drawn_earlier(self) -> str:
        """The :attr:`draws` in words; those seeded in their span only where there are no others."""
        draws = [draw for draw in self.draws if not draw.seeded]
        if draws:
            return f"{_spans(draws)}, which was in another state"
        return f"{_spans(self.draws)}, which it found in another state and then seeded" if self.draws else ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a stage differs.

    Attributes:
        name: a key of :data:`FIXES`.
        confidence: ``proven`` or ``likely``.
        because: the evidence, in a sentence.
    """

    name: str
    confidence: str
    because: str

    @property
    def fix(self) -> str:
        """Lines of Python that fix it."""
        return FIXES[self.name]


SEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "python": ("Python", "random.seed(seed)"),
        "numpy": ("NumPy", "numpy.random.seed(seed)"),
        "torch": ("torch", "torch.manual_seed(seed)"),
    }
)
"""Name and seeding call of each global generator whose first state is random in every process."""


@dataclass(frozen=True, slots=True)
class Seeding:
    """The global generators that ``set_seed`` seeds, and those that a difference was drawn from and that it does not.

    Attributes:
        seeded: names in :data:`SEEDS`.
        unseeded: likewise; never empty.
    """

    seeded: tuple[str, ...]
    unseeded: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """``set_seed seeds Python and NumPy, and not torch``."""
        seeded, unseeded = ([SEEDS[name][0] for name in names] for names in (self.seeded, self.unseeded))
        if not seeded:
            return f"{' and '.join(unseeded)} {'are' if unseeded[1:] else 'is'} not seeded"
        return f"set_seed seeds {' and '.join(seeded)}, and not {' or '.join(unseeded)}"

    @property
    def fix(self) -> str:
        """The missing lines."""
        return "\n".join(SEEDS[name][1] for name in self.unseeded)


def decide(evidence: StageEvidence) -> tuple[Reason, ...]:
    """Return the reasons that the evidence allows, the likeliest first; never empty, and one alone where it decides."""
    if evidence.one_sided and evidence.stage == "initial weights":
        return (_proven("other model", "only one of the two pipelines has a model"),)
    if evidence.one_sided:
        return (_likely("seen once", "only one of the two checks saw it: whether it differs is not known"),)
    if evidence.asked_otherwise and _could_follow(evidence):
        because = f"the two were not told to do the same: {', '.join(evidence.asked_otherwise)}"
        certain = evidence.whole != LOADER or bool(evidence.drew)
        return (Reason("asked otherwise", "proven" if certain else "likely", because),)
    return _of_hash_seed(evidence) or _by_stage(evidence)


def _by_stage(evidence: StageEvidence) -> tuple[Reason, ...]:
    """Judge by the stage; where that finds nothing, look for a generator that parted inside some code."""
    reasons = _ADVICE.get(evidence.stage, _of_model)(evidence)
    if evidence.parted and all(reason.name.startswith("unknown") for reason in reasons):
        left = " and ".join(f"{one.span} left {' and '.join(one.generators)}" for one in evidence.parted)
        because = f"{left} in another state, which was the same before: seeded from entropy, or drawn from more often"
        return (_likely("seeded inside", because),)
    return reasons


def _proven(name: str, because: str) -> Reason:
    return Reason(name, "proven", because)


def _likely(name: str, because: str) -> Reason:
    return Reason(name, "likely", because)


def _could_follow(evidence: StageEvidence) -> bool:
    """Return True if the user's settings can cause this difference: other indices, or numbers drawn at this stage."""
    if evidence.whole == LOADER:
        return True  # which may make anything of its seed
    if evidence.stage == "order":
        return evidence.order.same_indices is False
    return bool(evidence.drew) and evidence.sample.same_files is not False and not evidence.model.names_differ


def _spans(draws: Sequence[RandomDraw]) -> str:
    return " and ".join(f"{draw.span} drew from {' and '.join(draw.generators)}" for draw in draws)


def _of_hash_seed(evidence: StageEvidence) -> tuple[Reason, ...]:
    """Check for the effects of the hash seed: the order of sets, and with it perhaps that of imports, or ``hash()``.

    An order that differs is most likely that of a set, unless a generator behind it was in another state: then its seed
    was made by ``hash()``. Samples that differ in the same order may have either: noise seeded with ``hash(name)``, or
    labels numbered in the order of a set. A call of ``hash`` in the user's code is no proof: it may be of a number.
    """
    imported = "the user's modules were imported in another order"
    if not evidence.hash_order:
        if evidence.imports and (evidence.sample.other_transforms or not evidence.drew):
            why = "the transforms are others" if evidence.sample.other_transforms else "no generator was drawn from"
            return (_likely("import order", f"{imported}, and {why}"),)
        return ()
    gone = "two runs with the same PYTHONHASHSEED agree, with another they do not"
    if evidence.imports:
        return (_proven("import order", f"{imported}; {gone}, so a set decides it"),)
    calls = f"hash() is called in {', '.join(evidence.hash_calls[:_CALLS_SHOWN])}" if evidence.hash_calls else ""
    apart = dict.fromkeys((*evidence.order.given_moved, *filter(evidence.moved.__contains__, evidence.drew)))
    apart |= dict.fromkeys(name for draw in (*evidence.draws, *evidence.parted) for name in draw.generators)
    if evidence.order.no_generator and "torch" in evidence.moved:
        apart["torch"] = None
    if apart:
        seeded = f"{gone}, and {' and '.join(apart)} was in another state, so its seed follows hash()"
        return (_proven("hash of a text", f"{seeded}: {calls}") if calls else _likely("hash of a text", seeded),)
    if evidence.stage in ("file list", "order"):
        by_set = Reason("set order", "likely" if calls else "proven", gone)
        return (by_set, *([_likely("hash of a text", f"{gone}; {calls}")] if calls else []))
    by_hash = _likely("hash of a text", f"{gone}, and the order of the samples is the same; {calls or _NO_CALLS}")
    by_set = _likely("set order", f"{gone}: names or labels may be numbered in the order of a set")
    return (by_hash,) if calls else (by_set, by_hash)


def _of_files(_evidence: StageEvidence) -> tuple[Reason, ...]:
    return (_proven("other files", "the dataset has files in one check that it lacks in the other"),)


def _of_order(evidence: StageEvidence) -> tuple[Reason, ...]:
    return (_of_shuffle(evidence),) if evidence.order.same_indices is False else _of_listing(evidence)


def _of_shuffle(evidence: StageEvidence) -> Reason:
    """Decide where the sampler asked for other indices."""
    asked, when = "the sampler asked for other indices", "was in another state when the first batch was asked for"
    if evidence.order.given_moved:
        return _proven("unseeded shuffle", f"{' and '.join(evidence.order.given_moved)} {when}")
    if evidence.order.no_generator and "torch" in evidence.moved:
        return _proven("unseeded shuffle", f"the sampler has no generator of its own, and torch's {when}")
    # a loader always draws one number from torch's
    others = [draw.without(("torch",)) if draw.span == LOADER else draw for draw in evidence.draws]
    known = replace(evidence, draws=tuple(draw for draw in others if draw.generators) or evidence.draws)
    if known.draws and evidence.order.no_generator is None:
        return _likely("unseeded shuffle", f"{asked}, and {known.drawn_earlier}")
    return _likely("unknown order", f"{asked}, and no generator that it can have drawn from was in another state")


def _of_listing(evidence: StageEvidence) -> tuple[Reason, ...]:
    """Decide where the same indices lead to other files."""
    is_listed = evidence.order.listing or evidence.order.same_indices
    if is_listed and evidence.order.folder:
        because = f"the system lists {evidence.order.folder} in another order, and the dataset's list is not sorted"
        return (_proven("unsorted file listing", because),)
    if evidence.draws:
        what = "the dataset's list is in another order" if is_listed else "equal content comes at other places"
        return (_likely("unseeded shuffle", f"{what}, and {evidence.drawn_earlier}"),)
    if not is_listed:
        because = "the samples come in another order, but neither indices nor a list of files were seen"
        return (_likely("unknown order", because),)
    because = "the same indices lead to other files: the dataset's list is in another order and not sorted"
    by_set = _likely("set order", "the hash seeds differ, and no experiment excludes them")
    return (_likely("unsorted file listing", because), *([by_set] if evidence.hash_order is None else []))


def _of_content(evidence: StageEvidence) -> tuple[Reason, ...]:
    if evidence.sample.same_files is False:
        return (_proven("other file content", "files of the same name hold other bytes"),)
    if evidence.drawn:
        return (_random("random dataset", evidence, f"the dataset drew from {evidence.drawn} before any transform"),)
    if evidence.packages:
        because = f"the files are equal, what was read from them is not; versions: {evidence.packages}"
        return (_likely("other packages", because),)
    if evidence.draws:
        return (_likely("unseeded construction", f"what was read differs, and {evidence.drawn_earlier}"),)
    return (_likely("unknown content", "what was read differs, though no generator that was seen was drawn from"),)


def _of_transforms(evidence: StageEvidence) -> tuple[Reason, ...]:
    if evidence.whole == LOADER and evidence.draws:
        return (_likely("unseeded loader", evidence.drawn_earlier),)
    if evidence.whole == LOADER:  # an iterable other than DataLoader
        drawing = "no generator that was seen and drawn from was in another state"
        because = f"the loader gave other batches, and {drawing}: a clock, os.urandom, uuid, a set, a file"
        return (_likely("unknown content", because),)
    if evidence.sample.other_transforms:
        return (_likely("other transforms", "the samples went through other transforms, or in another order"),)
    what = evidence.sample.transform or evidence.whole or "the dataset"
    name = "random transform" if evidence.sample.transform or evidence.whole == "collate_fn" else "random dataset"
    if evidence.drawn:
        return (_random(name, evidence, f"{what} drew from {evidence.drawn}"),)
    if evidence.draws:
        return (_likely("unseeded construction", f"{what} gave another result, and {evidence.drawn_earlier}"),)
    if evidence.drew:
        because = f"{what} drew from {' and '.join(evidence.drew)}, whose state was the same before the sample"
        return (_likely(name, because),)
    drawing = "without drawing from any generator that was seen: a clock, os.urandom, uuid, a set"
    return (_likely("unknown content", f"{what} gave another result {drawing}"),)


def _random(name: str, evidence: StageEvidence, because: str) -> Reason:
    """Find what put the generator that was drawn from into another state."""
    drawn = [generator for generator in evidence.drew if generator in evidence.moved]
    by_init = " and ".join(generator for generator in drawn if generator in evidence.sample.moved_by_init)
    worker = f"worker {evidence.sample.worker}"
    if evidence.sample.worker is not None and by_init:
        because += f"; workers begin in the same state, and worker_init_fn moves {by_init} apart ({worker})"
        return _proven("worker seeds", because)
    if any(generator not in GLOBAL for generator in drawn):
        return _proven(name, f"{because}, a generator of its own, which was in another state")
    if evidence.sample.worker is None:
        return _proven(name, f"{because}, which was in another state")
    if any(generator in evidence.sample.moved_at_start for generator in drawn):
        began = f"{worker} began in another state, which the loader draws from torch's generator"
        return _proven(name, f"{because}; {began}")
    return _likely(name, f"{because}; {worker} began in the same state, and something drew from it before this sample")


def _of_weights(evidence: StageEvidence) -> tuple[Reason, ...]:
    if evidence.model.names_differ:
        return (_proven("other model", "the models have other parameters"),)
    if evidence.draws:
        is_known = any(draw.span == MAKE_MODEL and not draw.seeded for draw in evidence.draws)
        return (Reason("unseeded initialisation", "proven" if is_known else "likely", evidence.drawn_earlier),)
    because = "no generator that was seen was in another state: a checkpoint, or entropy"
    return (_likely("unknown weights", because),)


def _of_model(evidence: StageEvidence) -> tuple[Reason, ...]:
    kernel, origin = evidence.model.kernel, evidence.model.origin
    given = [what for stage, what in _GIVEN.items() if stage not in evidence.model.unseen]
    equal = f"{' and '.join(given)} are equal" if given else "what the model was given was not seen"
    if evidence.model.unseen and given:
        equal += f" ({' and '.join(evidence.model.unseen)} was not seen)"
    if origin in (Origin.INPUT, Origin.STATE):
        what = "input" if origin == Origin.INPUT else "parameters or buffers"
        because = f"{equal}, and {kernel} got other {what}: something changed them before the model ran"
        return (_likely("changed later", because),)
    if origin == Origin.RNG:
        return (_proven("random model", f"{kernel} drew from a generator in another state"),)
    if origin == Origin.SETTINGS:
        return (_proven("other settings", f"torch's settings differ; the first op that they reached is {kernel}"),)
    if origin == Origin.KERNEL:
        return (_likely("kernel", f"{kernel} gave another result from equal inputs"),)
    if evidence.packages:
        return (_likely("other packages", f"{equal}; {evidence.packages}"),)
    return (_likely("unknown model", f"{equal}, the model's results are not"),)


_ADVICE: Mapping[str, Callable[[StageEvidence], tuple[Reason, ...]]] = MappingProxyType(
    {
        "file list": _of_files,
        "order": _of_order,
        "before transform": _of_content,
        "after transform": _of_transforms,
        "initial weights": _of_weights,
    }
)
"""How each stage is judged; every other one as a result of the model."""

FIXES: Mapping[str, str] = MappingProxyType(
    {
        "other files": "# the same data set everywhere: copy it, and compare its checksums",
        "asked otherwise": "# the same seed, and the same arguments of the DataLoader, in both",
        "unseeded shuffle": "DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(seed))\n"
        "random.Random(seed).shuffle(files)  # where the dataset shuffles by itself",
        "unsorted file listing": "files = sorted(os.listdir(folder))  # likewise glob, Path.glob, os.walk, os.scandir",
        "set order": "for name in sorted(names):  # not: for name in set(names)",
        "hash of a text": "seed = zlib.crc32(name.encode())  # not hash(name), which is another in each process;\n"
        '# or int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")',
        "seeded inside": "# seed once, in set_seed: later no torch.seed(), random.seed() or manual_seed(time.time())",
        "import order": "for name in sorted(plugins):\n    importlib.import_module(name)",
        "unknown order": "DataLoader(dataset, sampler=sampler)  # of which everything is derived from the seed",
        "other file content": "# the same data set everywhere: compare checksums before training",
        "random dataset": "def __getitem__(self, index):\n"
        "    generator = np.random.default_rng((seed, index))  # or draw from torch, which is seeded in every worker",
        "unseeded construction": "torch.manual_seed(seed)  # likewise random and numpy: before the dataset is made;\n"
        "# what is drawn at import is drawn before set_seed: draw it in make_loader",
        "random transform": "torch.manual_seed(seed)  # before the loader is iterated; or, for the loader alone:\n"
        "DataLoader(dataset, generator=torch.Generator().manual_seed(seed))  # workers derive their seeds from it",
        "worker seeds": "def worker_init_fn(worker):\n"
        "    worker_seed = torch.initial_seed() % 2**32  # derived from the loader's generator\n"
        "    numpy.random.seed(worker_seed)\n"
        "    random.seed(worker_seed)",
        "unseeded loader": "def make_loader(seed):\n"
        "    rng = random.Random(seed)  # draw from it all that batches and their order are made of",
        "seen once": "# the same kind of loader and dataset in both",
        "changed later": "batch = [tensor.clone() for tensor in batch]  # do not change weights or batches in place",
        "other transforms": "transforms.Compose([...])  # in an order that is written down",
        "other packages": "pip freeze > requirements.txt  # and install the same versions everywhere",
        "unknown content": "# no clock, os.urandom, uuid or set in the dataset and its transforms",
        "unseeded initialisation": "torch.manual_seed(seed)  # before the model is made; one that is made at import\n"
        "# is made before set_seed: make it in make_model",
        "other model": "# the same code and configuration in both",
        "unknown weights": 'model.load_state_dict(torch.load("initial.pt", weights_only=True))',
        "random model": "torch.manual_seed(seed)  # before the first step",
        "other settings": "torch.backends.cudnn.benchmark = False\ntorch.use_deterministic_algorithms(True)",
        "kernel": "torch.use_deterministic_algorithms(True)\n"
        "torch.backends.cudnn.benchmark = False  # the cause: hashbench sweep --suite FILE.py --training",
        "unknown model": "torch.use_deterministic_algorithms(True)",
    }
)
"""For every reason, the code to write instead."""
