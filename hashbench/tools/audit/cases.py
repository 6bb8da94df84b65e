"""Single calls, from torch's own op database and from a table of inputs of ours that provoke races, and how many
different outcomes each has under the three settings of the flag.

Importing torch's test helpers freezes torch's backend flags for the process, so that only worker processes may call
what is here for ``op_db``.
"""

from __future__ import annotations

import ast
import csv
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hashbench.core.check.function import FunctionCall, fresh_copy, quiet
from hashbench.core.diagnose.calls.capture import copied
from hashbench.core.diagnose.replay import controls
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.run.leaves import NotComparableError, flatten
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.run.settings import applied
from hashbench.core.trace.arguments import argument_text, named_tensors, tensors_in
from hashbench.core.trace.digest import digest, dtype_name
from hashbench.tools.audit.audit_table import AuditOptions, Shown

LONGEST_INPUTS = 70
"""Characters of the text that describes a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One op, one dtype, one sample. ``differentiable``: a backward pass is looked at too; ``moved``: the inputs lie
    elsewhere in every run; ``process``: what torch's own gradient tests make of the output before they differentiate
    (eigenvectors are unique up to a phase only)."""

    source: str
    op: str
    dtype: str
    sample: str
    inputs: str
    call: FunctionCall
    differentiable: bool = False
    moved: bool = False
    process: Callable[[Any], Any] | None = None


@functools.cache
def op_database() -> dict[str, Any]:
    """Return torch's own entries by name, ``linalg.norm.subgradients_at_zero`` where an op has several. Freezes
    flags."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{entry.name}.{entry.variant_test_name}".rstrip("."): entry for entry in op_db}


def catalog() -> list[tuple[str, str]]:
    """List every ``(source, op)`` that can be audited."""
    stressed = dict.fromkeys(line.op for line in stress_lines())
    return [*(("op_db", name) for name in op_database()), *(("stress", name) for name in stressed)]


def cases_of(source: str, op: str, options: AuditOptions) -> Iterator[tuple[str, list[Case] | str]]:
    """Yield for each dtype that the op takes its name, and its cases or why they cannot be made."""
    for dtype in options.dtypes:
        reset_rng_state(options.seed)  # per dtype, so that inputs do not depend on what else was asked for
        try:
            cases = (_stressed if source == "stress" else _sampled)(op, dtype, options)
        except Exception as error:
            yield dtype, f"cannot make its inputs: {named_line(error)}"[:300]
            continue
        if cases:
            yield dtype, cases


def _sampled(op: str, dtype: str, options: AuditOptions) -> list[Case]:
    entry, kind, where = op_database()[op], getattr(torch, dtype), torch.device(options.device).type
    if kind not in entry.supported_dtypes(where):
        return []
    differentiable = entry.supports_autograd and kind in entry.supported_backward_dtypes(where)
    inputs = list(entry.sample_inputs(options.device, kind, requires_grad=differentiable))
    calls = [FunctionCall(entry.op, (sample.input, *sample.args), sample.kwargs) for sample in inputs]
    sizes = [sum(tensor.numel() for tensor in tensors_in([*call.named().values()])) for call in calls]
    made = []
    for number in chosen_samples(sizes, most=options.samples):
        call, process = calls[number], inputs[number].output_process_fn_grad
        made.append(Case("op_db", op, dtype, str(number), described(call), call, differentiable, process=process))
    return made


def chosen_samples(sizes: Sequence[int], *, most: int) -> tuple[int, ...]:
    """Choose the numbers of at most ``most`` samples, in their order: half of them (rounded up) the largest, the others
    spread evenly over the rest, since each differs from its neighbours in an option.

    >>> chosen_samples([1, 9, 1, 8, 1, 1], most=4)
    (0, 1, 3, 5)
    """
    if len(sizes) <= most:
        return tuple(range(len(sizes)))
    largest = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))[: -(-most // 2)]
    rest = [number for number in range(len(sizes)) if number not in largest]
    count = most - len(largest)
    spread = [rest[round(step * (len(rest) - 1) / max(1, count - 1))] for step in range(count)]
    return tuple(sorted([*largest, *spread]))


def described(call: FunctionCall) -> str:
    """Describe the arguments on one short line: shapes of tensors, values of the rest."""
    shown = [*map(_shown, call.args), *((name, _shown(value)) for name, value in (call.kwargs or {}).items())]
    text = argument_text(shown).replace("'", "")
    return text if len(text) <= LONGEST_INPUTS else f"{text[: LONGEST_INPUTS - 1]}…"


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else ",".join(map(str, value.shape))
        return f"{dtype_name(value.dtype)}[{shape}]"
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------- inputs of our own

TABLE = Path(__file__).with_name("audit_stress.csv")
"""Large inputs with duplicate indices, ties, unaligned or overlapping views. Nothing in its text is executed: it is
parsed, and only :class:`Builders` are called."""


@dataclass(frozen=True, slots=True)
class StressLine:
    """One line of the table. ``call`` is a path below ``torch``; ``options``: ``backward`` where gradients of all
    random tensors are looked at as well, ``moved`` where the inputs lie at another offset in every run, or empty."""

    op: str
    sample: str
    call: str
    arguments: str
    dtypes: str
    options: str


@functools.cache
def stress_lines() -> tuple[StressLine, ...]:
    """Return the lines of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:  # of this package, and read by workers: without pandas
        return tuple(StressLine(**line) for line in csv.DictReader(file))


def _stressed(op: str, dtype: str, options: AuditOptions) -> list[Case]:
    made = []
    for line in stress_lines():
        if line.op == op and dtype in line.dtypes.split():
            call = built(line, dtype=getattr(torch, dtype), device=options.device, seed=options.seed)
            backward, moved = line.options == "backward", line.options == "moved"
            made.append(Case("stress", op, dtype, line.sample, line.arguments, call, backward, moved))
    return made


def built(line: StressLine, *, dtype: torch.dtype, device: str, seed: int) -> FunctionCall:
    """Build the call of a line with fresh arguments, the same for the same seed; :class:`HashbenchError` where torch
    has no such function, or its arguments do not parse or name something else than a builder."""
    try:
        function = operator.attrgetter(line.call)(torch)
        tree = ast.parse(f"call({line.arguments})", mode="eval").body
        assert isinstance(tree, ast.Call)
        builders = Builders(dtype, device, seed=seed, differentiable=line.options == "backward")
        named: dict[str, Any] = {}
        args = tuple(_value(node, builders, named) for node in tree.args)
        kwargs = {str(keyword.arg): _value(keyword.value, builders, named) for keyword in tree.keywords}
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise HashbenchError(
            f"cannot build {line.call}({line.arguments})", consequence=f"{type(error).__name__}: {error}"
        ) from error
    return FunctionCall(function, args, kwargs)


class Builders:
    """What the text of arguments may call, a method each; ``docs/audit.md`` describes them."""

    def __init__(self, dtype: torch.dtype, device: str, *, seed: int, differentiable: bool) -> None:
        self._dtype, self._device, self._differentiable = dtype, device, differentiable
        self._generator = torch.Generator().manual_seed(seed)

    def _tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` in the dtype of the sample; what is differentiated asks for a gradient."""
        made = values.to(self._dtype).to(self._device)
        return made.requires_grad_(self._differentiable and made.is_floating_point())

    def normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return self._tensor(drawn if self._dtype.is_floating_point or self._dtype.is_complex else drawn * 100)

    def ties(self, *shape: int) -> torch.Tensor:
        return self._tensor(torch.randint(0, 4, shape, generator=self._generator))

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, bound, shape, generator=self._generator).to(self._device)

    def labels(self, bound: int, *shape: int) -> torch.Tensor:
        return self.below(bound, *shape) + 1

    def mask(self, *shape: int) -> torch.Tensor:
        return self.below(2, *shape).bool()

    def lengths(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=self._device)

    def grid(self, *shape: int) -> torch.Tensor:
        return self._tensor(torch.rand(shape, generator=self._generator) * 0.1)

    def gram(self, size: int) -> torch.Tensor:
        drawn = torch.randn(size, size, generator=self._generator)
        return self._tensor(drawn @ drawn.T + size * torch.eye(size))

    def sparse(self, *sizes: int) -> torch.Tensor:
        """Build a sparse tensor: ``sizes`` are the shape and the number of entries, of which many stand in one
        place."""
        *shape, count = sizes
        indices = torch.stack([torch.randint(0, size, (count,), generator=self._generator) for size in shape])
        values = torch.randn(count, generator=self._generator).to(self._dtype)
        return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=True).to(self._device)

    def part(self, tensor: torch.Tensor, start: int, stop: int, step: int) -> torch.Tensor:
        return tensor[start:stop:step]

    def t(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t()

    def columns(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor[:, :count]


BUILDERS = frozenset(name for name in vars(Builders) if not name.startswith("_"))


def _value(node: ast.expr, builders: Builders, named: dict[str, Any]) -> Any:
    """Evaluate ``node``: a literal, a list, ``(name := …)``, a name, or the call of a builder."""
    match node:
        case ast.NamedExpr(target=ast.Name(id=name), value=inner):
            named[name] = _value(inner, builders, named)
            return named[name]
        case ast.Name(id=name):
            if name not in named:
                raise ValueError(f"{name} has no value")
            return named[name]
        case ast.List(elts=items):
            return [_value(item, builders, named) for item in items]
        case ast.Call(func=ast.Name(id=name), args=items, keywords=[]):
            if name not in BUILDERS:
                raise ValueError(f"{name} is not a builder")
            return getattr(builders, name)(*(_value(item, builders, named) for item in items))
    return ast.literal_eval(node)


SHIFTS = (0, 1, 2, 3, 4, 6, 8, 12)
"""Elements behind a cache line at which the moved inputs of successive runs begin, as views of larger tensors do."""


def at_offset(call: FunctionCall, run: int) -> FunctionCall:
    """Return the call with a copy of every tensor among its arguments, which begins as many elements behind a cache
    line as run number ``run`` has it."""
    shift = SHIFTS[run % len(SHIFTS)]

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return copied(value, address=shift * value.itemsize).requires_grad_(value.requires_grad)

    return FunctionCall(call.function, tuple(map(moved, call.args)), call.kwargs)


# -------------------------------------------------------------------------------------------------- measuring

FLAG = {
    "off": {"deterministic_algorithms": "off", "fill_uninitialized_memory": "True"},
    "on": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "True"},
    "unfilled": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "False"},
}
"""The three settings under which everything is measured."""

POISONED_RUNS = 2
"""Runs for each of two contents of memory that nobody wrote."""


@dataclass(slots=True)
class Outcomes:
    """The fingerprints of one pass under one setting: in ``plain`` memory, and by what memory that nobody wrote was
    ``poisoned`` with. The first error ends it."""

    plain: list[int] = field(default_factory=list)
    poisoned: dict[int, set[int]] = field(default_factory=dict)
    error: str = ""
    failure: Shown | None = None

    def add(self, outcome: int, *, poison: int | None) -> None:
        """Count one more run."""
        if poison is None:
            self.plain.append(outcome)
        else:
            self.poisoned.setdefault(poison, set()).add(outcome)

    @property
    def distinct(self) -> int | None:
        """Different outcomes of runs in ordinary memory; ``None`` where one raised."""
        return None if self.error or not self.plain else len(set(self.plain))

    @property
    def measured(self) -> Shown:
        """What these outcomes show."""
        if self.failure is not None:
            return self.failure
        if not self.plain:
            return Shown.NOT_RUN
        if len(set(self.plain)) > 1:
            return Shown.DIFFERS
        return Shown.FOLLOWS if follows_poison(self.poisoned) else Shown.IDENTICAL


def follows_poison(poisoned: Mapping[int, set[int]]) -> bool:
    """Return True if each content of unwritten memory gives one outcome of its own."""
    alone = [outcome for outcomes in poisoned.values() if len(outcomes) == 1 for outcome in outcomes]
    return len(alone) == len(controls.POISONS) == len(set(alone))


class Measurement:
    """The outcomes of one case: ``passes[setting][phase]``. What turns out to have nothing to differentiate has no
    backward pass."""

    def __init__(self, case: Case) -> None:
        self.case = case
        phases = ("forward", "backward") if case.differentiable else ("forward",)
        self.passes = {setting: {phase: Outcomes() for phase in phases} for setting in FLAG}

    def run(self, setting: str, number: int, *, seed: int, poison: int | None = None) -> None:
        """Make one more run. What has raised, or differs anyway, is not run on other memory; a pass that raised is not
        run again."""
        passes, case = self.passes[setting], self.case
        forward, backward = passes["forward"], passes.get("backward")
        if forward.error or (poison is not None and (case.moved or forward.measured is Shown.DIFFERS)):
            return
        with _noted(forward):
            call = at_offset(case.call, number) if case.moved else fresh_copy(case.call)
            reset_rng_state(seed)
            value = call()
            forward.add(fingerprint(value, call), poison=poison)
        if forward.error or backward is None or backward.error:
            return
        with _noted(backward):
            values = gradients(case, call, value, seed=seed)
            if values is not None:
                backward.add(fingerprint(values), poison=poison)
                return
            for each in self.passes.values():
                del each["backward"]


def measure(cases: Sequence[Case], *, runs: int, seed: int) -> list[Measurement]:
    """Run every case ``runs`` times under each setting, then with two contents of unwritten memory."""
    measurements = [Measurement(case) for case in cases]
    with quiet():
        for setting, wanted in FLAG.items():
            with applied(wanted):
                for measurement in measurements:
                    for number in range(runs):
                        measurement.run(setting, number, seed=seed)
                for poison in controls.POISONS:
                    # What the flag fills must stay filled: no mode may write over it.
                    with controls.poisoned_memory(poison, through_mode=setting != "on"):
                        for measurement in measurements:
                            for number in range(POISONED_RUNS):
                                measurement.run(setting, number, seed=seed, poison=poison)
    return measurements


@contextmanager
def _noted(outcomes: Outcomes) -> Iterator[None]:
    """Keep an exception as what ended these outcomes."""
    try:
        yield
    except Exception as error:
        outcomes.error = named_line(error, limit=300)
        known = isinstance(error, (NotComparableError, HashbenchError))
        outcomes.failure = Shown.NOT_COMPARABLE if known else Shown.RAISES


def fingerprint(value: Any, call: FunctionCall | None = None) -> int:
    """Hash a result: equal for equal results and, with ``call``, for equal arguments after it, bit by bit; strides
    count."""
    parts = [*flatten(value, "output"), *(named_tensors(call.named()) if call is not None else ())]
    with torch.no_grad():
        contents = [digest(item.detach()) if isinstance(item, torch.Tensor) else repr(item) for _, item in parts]
    return hash((*(name for name, _ in parts), *contents))


def gradients(case: Case, call: FunctionCall, value: Any, *, seed: int) -> dict[str, Any] | None:
    """Compute gradients of the arguments, by name, for a random cotangent that is the same in every run; ``None`` where
    no output depends on an input that asks for one."""
    value = case.process(value) if case.process is not None else value
    outputs = [tensor for _, tensor in named_tensors(value) if tensor.requires_grad]
    inputs = {name: tensor for name, tensor in named_tensors(call.named()) if tensor.requires_grad and tensor.is_leaf}
    if not outputs or not inputs:
        return None
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_cotangent(tensor, generator) for tensor in outputs]
    values = torch.autograd.grad(outputs, list(inputs.values()), cotangents, allow_unused=True)
    return dict(zip(inputs, values, strict=True))


def _cotangent(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.is_complex():
        drawn = torch.complex(drawn, torch.randn(tensor.shape, generator=generator))
    return drawn.to(tensor.dtype).to(tensor.device)
