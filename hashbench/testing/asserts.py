"""The checks, each a method of what holds for all checks of one caller. torch is imported by the first call."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hashbench.testing.options import EVERY, NAMES, CheckFailedError, Options, folder_of, options_of

if TYPE_CHECKING:
    from hashbench.core.check.function import FunctionCall
    from hashbench.core.records import Row, RunOptions
    from hashbench.core.run.workload import Tokens

SIZES = (1, 2, 8)
"""Default sizes that are compared with the whole batch, if smaller."""
EQUAL_RUNS, DREW, RECORDED = "hashbench_equal_runs", "hashbench_drew_in_eval", "hashbench_recorded"
"""What a caller is told: the number of equal runs, what drew random numbers in ``eval()``, and what was recorded."""
_QUICK_RUNS = 5
"""Default runs of a function that takes milliseconds."""


def _ignore(_name: str, _what: object) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Asserts:
    """The checks of one caller.

    Attributes:
        defaults: options by name that hold where a call sets none.
        files: folder where relative names of files begin; ``None``: the working directory.
        records: kernels are recorded, and not compared.
        how_to_record: the command that records kernels.
        tell: called with one of :data:`EQUAL_RUNS`, :data:`DREW`, :data:`RECORDED`, and what there is to say.
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    files: Path | None = None
    records: bool = False
    how_to_record: str = "assert_kernels_unchanged(…, record=True)"
    tell: Callable[[str, Any], None] = _ignore

    def assert_runs_equal(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` several times from the reset random state, each time on copies of the
        arguments, and fail where two runs differ in any bit.

        The options of :class:`~hashbench.testing.options.Options` go by name; all else is the function's own. Compared
        are what it returns, its tensor arguments and their gradients, and the state of modules and optimizers among
        the arguments. Where it returns ``None``, what every op left is compared, too.

        Returns:
            What the first run returned.

        Raises:
            CheckFailedError: runs differ, or nothing can be compared.
        """
        __tracebackhide__ = True
        asked = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
        _require_callable("assert_runs_equal", function, "a function to run", tip=": pass it uncalled")
        if taken := sorted(asked.keys() & _parameters(function)):
            raise CheckFailedError(f"{taken[0]}= could be meant for the function too: bind it with functools.partial.")
        from hashbench.core.check.function import FunctionCall

        options = options_of(asked, self.defaults, of="assert_runs_equal")
        call = FunctionCall.of(function, args, kwargs)
        return self.check_call(call, name_of(function), options, every_op=bool(options.ops))

    def check_call(self, call: FunctionCall, name: str, options: Options, *, every_op: bool) -> Any:
        """Run a call several times, and return what the first run returned.

        Args:
            call: the function and its arguments.
            name: what the report calls it.
            options: how it is run.
            every_op: compare what every op left.

        Raises:
            CheckFailedError: runs differ, or nothing can be compared.
        """
        __tracebackhide__ = True
        from hashbench.core.check.function import check_function
        from hashbench.core.extensions import shown

        drawn: list[str] = []
        with _named(name), folder_of(options) as folder:
            row, value = check_function(
                call,
                name,
                _run_options(call, options, folder),
                every_op=every_op,
                allow_empty=options.allow_empty,
                quick_runs=_QUICK_RUNS,
                on_draw_in_eval=lambda: drawn.append(name),
            )
            row = shown(row)
            _require_pass(row, folder=folder)
        self.tell(EQUAL_RUNS, row.runs or 2)
        for each in drawn:
            self.tell(DREW, each)
        return value

    def assert_batch_invariant(
        self,
        model: Callable[..., Any],
        inputs: Any,
        *,
        sizes: Sequence[int] | None = None,
        invariance: str | Sequence[str] = "batch",
        tokens: Tokens | None = None,
        **options: Any,
    ) -> None:
        """Call the model, in ``eval`` mode, with its inputs and with the first 8, 2 and 1 items of them, each time from
        the reset random state and on a copy of the model; an item must not differ in any bit.

        Args:
            model: a module or any function.
            inputs: a tuple or list (positional arguments), a mapping (by name) or one tensor. The batch is the first
                dimension of all tensors among them; those outputs are compared whose first dimension follows it.
            sizes: of the smaller batches; ``None``: :data:`SIZES`.
            invariance: what ``hashbench sweep --invariance`` takes, words in one text or several. With others than
                ``batch`` the items are computed again in another order, or the tokens of a mapping beside padding or
                after a cache; all of them are checked.
            tokens: names the arguments for that, where they are not called as those of transformers.
            options: ``runs`` and those of :data:`~hashbench.testing.options.EVERY`.

        Raises:
            CheckFailedError: an item differs, or an invariance cannot be checked.
        """
        __tracebackhide__ = True
        chosen = _chosen(self.defaults, "assert_batch_invariant", options, ("runs", *EVERY))
        _require_callable("assert_batch_invariant", model)
        from hashbench.core.run.workload import batch_of
        from hashbench.extensions.invariance.function import check_invariance

        call, name = _call_of(model, inputs), name_of(model)
        batch = batch_of(inputs, None) or 0
        smaller = [size for size in SIZES if size < batch] if sizes is None else [n for n in sizes if n != batch]
        failed: list[CheckFailedError] = []
        with folder_of(chosen) as folder:
            for each in _invariances(invariance, sizes, tokens):
                run_options = _run_options(call, chosen, folder, mode=f"{each}-invariance")
                try:
                    with _named(name):
                        row = check_invariance(call, name, run_options, sizes=smaller, tokens=tokens)
                    _require_pass(row, folder=folder)
                except CheckFailedError as error:
                    failed.append(error)
        if failed:
            raise CheckFailedError("\n\n".join(map(str, failed)), *(one for each in failed for one in each.findings))

    def assert_compiled_equals_eager(
        self,
        model: Callable[..., Any],
        inputs: Any,
        *,
        backend: str = "inductor",
        training: bool | None = None,
        loss: Callable[[Any], Any] | None = None,
        tolerance: float | None = None,
        **options: Any,
    ) -> None:
        """Compile the model. A result must be within the tolerance of PyTorch's harness, and nothing that the compiler
        made may compute something else in float64, too, also if all results are within it.

        Args:
            model: a module or any function.
            inputs: as of :meth:`assert_batch_invariant`.
            backend: of ``torch.compile``.
            training: differentiate a loss and compare gradients, parameters and buffers; ``None``: if the model is in
                ``train()`` mode and has parameters that require gradients.
            loss: gets the output and returns a scalar; ``None``: the mean of all outputs.
            tolerance: absolute and relative; ``None``: that of the harness.
            options: those of :data:`~hashbench.testing.options.EVERY`.

        Raises:
            CheckFailedError: a result or kernel is wrong, or nothing can be compiled.
        """
        __tracebackhide__ = True
        chosen = _chosen(self.defaults, "assert_compiled_equals_eager", options, EVERY)
        _require_callable("assert_compiled_equals_eager", model)
        _require_tolerance(tolerance)
        from hashbench.extensions.compiled.failure import accuracy_finding, is_wrong
        from hashbench.extensions.compiled.function import check_compiled, is_trained

        mode = "training" if (is_trained(model) if training is None else training) else "inference"
        with _named(name_of(model)), folder_of(chosen) as folder:
            asked = _run_options(_call_of(model, inputs), chosen, folder, mode=mode)
            run_options = replace(asked, backend=backend, runs=2)
            row = check_compiled(model, inputs, name_of(model), run_options, loss=loss, tolerance=tolerance)
            if is_wrong(row):
                finding = accuracy_finding(row, folder=folder)
                raise CheckFailedError(str(finding), finding)

    def assert_ranks_deterministic(
        self,
        factory: Callable[[], Any],
        *,
        ranks: int = 2,
        training: bool = True,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        """Run the model of the factory twice on several processes with a process group. Two runs must not differ on any
        rank in any bit, nor parameters that must be replicas between ranks; the message names rank and kernel.

        Args:
            factory: a function of a module, which every rank imports: called without arguments for every run, it
                returns ``(module, example_inputs)`` or a ``hashbench.Workload``.
            ranks: number of processes.
            training: train it, and compare loss, gradients and parameters, too.
            device: of the model.
            options: ``runs`` and those of :data:`~hashbench.testing.options.EVERY`.

        Raises:
            CheckFailedError: ranks or runs differ, or the ranks cannot run.
        """
        __tracebackhide__ = True
        chosen = _chosen(self.defaults, "assert_ranks_deterministic", options, ("runs", *EVERY))
        _require_callable("assert_ranks_deterministic", factory, "a function that builds a model")
        _require_count("ranks", ranks)
        from hashbench.core.check.function import FunctionCall
        from hashbench.extensions.ranks.function import check_ranks

        with _named(name_of(factory)), folder_of(chosen) as folder:
            mode = "training" if training else "inference"
            run_options = _run_options(FunctionCall(factory), chosen, folder, mode=mode)
            run_options = replace(run_options, device=device, runs=run_options.runs or 2)
            _require_pass(check_ranks(factory, name_of(factory), run_options, ranks=ranks), folder=folder)

    def assert_kernels_unchanged(
        self,
        model: Callable[..., Any],
        inputs: Any,
        file: str | os.PathLike[str],
        *,
        threads: int | None = None,
        name: str | None = None,
        record: bool = False,
        **options: Any,
    ) -> None:
        """Call the model once to see which kernels it calls, and run each that the file has on the synthetic inputs of
        ``hashbench fingerprint``. None may give something else than the file says, and the model calls no other
        kernels.

        Args:
            model: a module or any function.
            inputs: as of :meth:`assert_batch_invariant`.
            file: a relative name begins at the working directory; in pytest at the folder of the test's file.
            threads: torch's; ``None``: as many as when it was recorded.
            name: what the file calls the model; ``None``: its class, or the function's name.
            record: write the file, also over an existing one, instead of comparing; so does ``--hashbench-record``.
            options: ``seed``, ``deterministic``, ``tracer`` and ``output``.

        Raises:
            CheckFailedError: a kernel changed, or the file cannot be used.
        """
        __tracebackhide__ = True
        chosen = _chosen(
            self.defaults, "assert_kernels_unchanged", options, ("seed", "deterministic", "tracer", "output")
        )
        _require_callable("assert_kernels_unchanged", model)
        _require_count("threads", 1 if threads is None else threads)
        from hashbench.extensions.fingerprint.check import changed_kernels, record_function

        call, path, named = _call_of(model, inputs), (self.files or Path()) / file, name or name_of(model)
        with _named(named), folder_of(chosen) as folder:
            run_options = replace(_run_options(call, chosen, folder), threads=threads)
            if record or self.records:
                self.tell(RECORDED, f"{file}: {named}, {record_function(call, named, run_options, path)}")
                return
            _require_file(path, f"{named}: there is no {file}", how_to_record=self.how_to_record)
            keep = folder / "kernels.txt"
            finding = changed_kernels(call, named, run_options, path, keep=keep, how_to_record=self.how_to_record)
            if finding is not None:
                raise CheckFailedError(str(finding), finding)


def _chosen(defaults: Mapping[str, Any], check: str, asked: Mapping[str, Any], names: Sequence[str]) -> Options:
    """Return the options of a check that has these; others of its parameters are named by its signature."""
    parameters = inspect.signature(getattr(Asserts, check)).parameters.values()
    own = ", ".join(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return options_of(asked, defaults, of=check, names=names, own=own)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or model in a message."""
    return str(getattr(function, "__qualname__", type(function).__name__)).replace("<locals>.", "")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let errors of the user be failures of the check, under the name of what is checked."""
    from hashbench.core.errors import HashbenchError

    try:
        yield
    except HashbenchError as error:
        raise CheckFailedError(f"{name}: {error}") from None


def _require_pass(row: Row, *, folder: Path) -> None:
    from hashbench.core.catalog import Status
    from hashbench.core.extensions import failure

    if row.accuracy == Status.SKIPPED:
        raise CheckFailedError(f"{row.name}: {row.error}")
    if row.accuracy != Status.PASS:
        finding = failure(row, folder=folder)
        raise CheckFailedError(str(finding), finding)


def _require_callable(check: str, subject: object, needs: str = "a model to call", *, tip: str = "") -> None:
    if not callable(subject):
        raise CheckFailedError(f"{check} needs {needs}, not a {type(subject).__name__}{tip}.")


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise CheckFailedError(f"{name} must be an int >= 1, got {value!r}")


def _require_tolerance(value: float | None) -> None:
    if value is not None and not 0 <= value < float("inf"):
        raise CheckFailedError(f"tolerance must be a number >= 0, got {value!r}")


def _require_file(path: Path, missing: str, *, how_to_record: str) -> None:
    if not path.exists():
        raise CheckFailedError(f"{missing}, so nothing was compared. Record it: `{how_to_record}`.")


def _run_options(call: FunctionCall, options: Options, folder: Path, *, mode: str = "inference") -> RunOptions:
    """Return the options of the call's runs, whose files lie in ``folder``."""
    from hashbench.core.check.function import device_of
    from hashbench.core.records import RunOptions

    return RunOptions(
        mode=mode,
        device=device_of(call),
        runs=options.runs,
        seed=options.seed,
        deterministic=options.deterministic or "",
        replays=options.replays,
        diagnose_budget=options.diagnose_budget if options.diagnose else 0,
        tracer=options.tracer,
        stress=options.stress,
        output=str(folder),
    )


def _invariances(asked: str | Sequence[str], sizes: Sequence[int] | None, tokens: Tokens | None) -> Sequence[str]:
    """Return the invariances to check, or fail if the request is none that can be met."""
    from hashbench.core.catalog import INVARIANCES
    from hashbench.core.records import invariances_of

    try:
        words = [word.strip() for word in asked.split(",")] if isinstance(asked, str) else asked
        invariances = invariances_of(words)
    except ValueError as error:
        raise CheckFailedError(f"invalid invariance {asked!r}: {error}") from None
    if not invariances:
        raise CheckFailedError("invariance must not be empty")
    if sizes is not None and "batch" not in invariances:
        raise CheckFailedError(f"sizes= requires invariance 'batch', got {asked!r}")
    if tokens is not None and not any(INVARIANCES[f"{each}-invariance"].unit == "tokens" for each in invariances):
        raise CheckFailedError(f"tokens= requires an invariance of tokens (padding, decode), got {asked!r}")
    return invariances


def _call_of(model: Callable[..., Any], inputs: Any) -> FunctionCall:
    """Return the call of a model whose inputs are a tuple or list, a mapping or one tensor."""
    from hashbench.core.check.function import FunctionCall

    if isinstance(inputs, Mapping):
        return FunctionCall.of(model, (), inputs)
    return FunctionCall.of(model, inputs if isinstance(inputs, (list, tuple)) else [inputs], {})


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that a function declares."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins do not tell
        return set()
