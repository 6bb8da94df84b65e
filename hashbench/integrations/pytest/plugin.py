"""The pytest plug-in: ``assert_runs_equal``, ``@pytest.mark.run_to_run``, ``assert_batch_invariant``,
``assert_compiled_equals_eager``, ``assert_ranks_deterministic`` and ``assert_kernels_unchanged``.

pytest loads this module in every session of every project that has hashbench installed, so it imports nothing but
pytest; torch and the rest of hashbench are imported by the first test that asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from hashbench.core.check.function import FunctionCall
    from hashbench.core.records import Row, RunOptions
    from hashbench.core.run.workload import Tokens

MARKER = "run_to_run"
_FIXTURE, _OF_BATCHES, _OF_KERNELS = "assert_runs_equal", "assert_batch_invariant", "assert_kernels_unchanged"
_OF_COMPILED, _OF_RANKS = "assert_compiled_equals_eager", "assert_ranks_deterministic"
_RECORD, _RECORDED = "--hashbench-record", "hashbench_recorded"
_MARKERS_OWN = "_hashbench_run_to_run"
"""Name under which no conftest.py overrides the fixture."""
_SEED = 1337
_INI = {
    "hashbench_runs": (
        int,
        2,
        2,
        "runs of a function that must be equal; if unset, 5 of one that takes < 50 ms",
    ),
    "hashbench_replays": (int, 20, 2, "repetitions of an experiment on a difference, at least"),
    "hashbench_diagnose_budget": (float, 30.0, 0, "seconds for the experiments on one difference (0: none)"),
}
"""Option of ``pytest.ini`` → type, default, minimum, help."""
_TRACERS = ("auto", "native", "python")
_EQUAL_RUNS = "hashbench_equal_runs"
_DREW = "hashbench_drew_in_eval"
_QUICK_RUNS, _MORE_RUNS = 5, 21
"""Default runs of a function that takes milliseconds, and what the summary suggests."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one function is run; what the marker takes.

    Args:
        runs: how often; all runs are compared with the first. ``None``: ``hashbench_runs``, else 5 where the first run
            takes less than 50 ms, else 2.
        seed: torch's, NumPy's and Python's global generators are set to it before every run.
        deterministic: ``on``, ``warn`` or ``off`` puts the settings of a sweep in force
            (``torch.use_deterministic_algorithms``, library flags); ``None``: those that the test has.
        diagnose: look for the cause of a difference, which runs the function many more times.
        ops: compare what every op left, not results alone. ``None``: the marker does, the fixture does not.
        allow_empty: a function that returns nothing and runs no op passes.
        tracer: ``auto``, ``native`` or ``python`` records the ops; ``None``: ``hashbench_tracer``, else ``auto``.
        stress: runs that agree are made again under perturbations that must not matter (more threads than cores, load,
            other content in fresh memory, other addresses, the garbage collector at other moments), which must agree,
            too. A function is not run in a fresh process.
    """

    runs: int | None = None
    seed: int = _SEED
    deterministic: str | None = None
    diagnose: bool = True
    ops: bool | None = None
    allow_empty: bool = False
    tracer: str | None = None
    stress: bool = False

    def __post_init__(self) -> None:
        if self.runs is not None and (type(self.runs) is not int or self.runs < 2):
            raise ValueError(f"runs must be an int >= 2, got {self.runs!r}")
        if self.deterministic not in (None, "on", "warn", "off"):
            raise ValueError(f"deterministic must be 'on', 'warn', 'off' or None, got {self.deterministic!r}")
        if self.tracer not in (None, *_TRACERS):
            raise ValueError(f"tracer must be {', '.join(map(repr, _TRACERS))} or None, got {self.tracer!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an int from 0 to 2**32 - 1, got {self.seed!r}")


_NAMES = tuple(field.name for field in dataclasses.fields(Options))


# ------------------------------------------------------------------------------------------------- hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of ``pytest.ini``."""
    group = parser.getgroup("hashbench", "determinism checks")
    group.addoption(
        "--hashbench-output",
        metavar="DIR",
        default=None,
        help="keep traces and repros of differences in DIR, a folder for each test (default: pytest's own temporary "
        "folder)",
    )
    group.addoption(
        _RECORD,
        action="store_true",
        help=f"have {_OF_KERNELS} write its files, also where they are there, instead of comparing with them",
    )
    for name, (_, default, _, text) in _INI.items():
        parser.addini(name, f"{text} (default {default:g})", default="")
    parser.addini("hashbench_tracer", f"what records the ops: {', '.join(_TRACERS)} (default auto)", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and validate the options."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(runs=None, seed={_SEED}, deterministic=None, diagnose=True, ops=True, allow_empty=False, "
        "tracer=None, stress=False): "
        "run the test several times from one random state; what it returns and what every torch op leaves must be "
        "the same bit by bit.",
    )
    for name in _INI:
        _setting(config, name)
    _tracer(config)
    output = _asked_output(config)
    if output is not None:
        existing = next(path for path in (output, *output.parents) if path.exists())
        if not existing.is_dir():
            raise pytest.UsageError(f"--hashbench-output: {existing} is not a folder")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Request the fixture for marked tests."""
    if isinstance(item, pytest.Function) and item.get_closest_marker(MARKER) is not None:
        item.fixturenames.append(_MARKERS_OWN)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the native tracer if tests will use it, so that no test waits for it; only one of several processes
    does."""
    config = session.config
    fixtures = {_FIXTURE, _OF_BATCHES, _OF_COMPILED, _OF_RANKS, _OF_KERNELS, _MARKERS_OWN}
    uses = any(fixtures & set(getattr(item, "fixturenames", ())) for item in session.items)
    if uses and not config.option.collectonly and _tracer(config) != "python":
        from hashbench.core.trace.tracer import native_unavailable

        native_unavailable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker would be ignored."""
    if item.get_closest_marker(MARKER) is None:
        return
    unittest = sys.modules.get("unittest")
    owner = getattr(item, "cls", None)
    if unittest is not None and owner is not None and issubclass(owner, unittest.TestCase):
        pytest.fail(f"{MARKER} cannot run a method of unittest.TestCase: make it a plain function.", pytrace=False)
    if not isinstance(item, pytest.Function):
        pytest.fail(f"{MARKER} cannot run a {type(item).__name__}: only test functions run twice.", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a marked test several times."""
    mark = pyfuncitem.get_closest_marker(MARKER)
    if mark is None:
        return (yield)
    function = pyfuncitem.obj
    options = _options_of(mark)
    if inspect.iscoroutinefunction(function):
        pytest.fail(f"{MARKER} cannot run a coroutine: mark a plain function that awaits it.", pytrace=False)
    check = cast(RunsEqual, pyfuncitem.funcargs[_MARKERS_OWN])
    called = []

    @functools.wraps(function)
    def several_times(**fixtures: Any) -> None:
        called.append(True)
        check.marked_test(function, fixtures, options)

    pyfuncitem.obj = several_times
    try:
        outcome = yield
    finally:
        pyfuncitem.obj = function
    if not called:
        pytest.fail(f"{MARKER}: another plug-in ran the test in its own way, once.", pytrace=False)
    return outcome


@pytest.fixture
def assert_runs_equal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunsEqual:
    """Return a callable that takes a function and its arguments, and fails if two runs of it differ."""
    return RunsEqual(request.node.nodeid, request.config, tmp_path_factory, request.node.user_properties)


@pytest.fixture
def assert_batch_invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BatchInvariant:
    """Return a callable that takes a model and its inputs, and fails if an item differs in a smaller batch."""
    return BatchInvariant(RunsEqual(request.node.nodeid, request.config, tmp_path_factory))


@pytest.fixture
def assert_compiled_equals_eager(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CompiledEqualsEager:
    """Return a callable that takes a model and its inputs, and fails if ``torch.compile`` changes what it computes."""
    return CompiledEqualsEager(RunsEqual(request.node.nodeid, request.config, tmp_path_factory))


@pytest.fixture
def assert_ranks_deterministic(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> RanksDeterministic:
    """Return a callable that takes a function which builds a model, and fails if two runs on several ranks differ."""
    return RanksDeterministic(RunsEqual(request.node.nodeid, request.config, tmp_path_factory))


@pytest.fixture
def assert_kernels_unchanged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KernelsUnchanged:
    """Return a callable that takes a model, its inputs and a file, and fails if a kernel differs from the file."""
    return KernelsUnchanged(request.node, RunsEqual(request.node.nodeid, request.config, tmp_path_factory))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was recorded and what equal runs may have missed, also for the workers of pytest-xdist."""
    passed = terminalreporter.getreports("passed")
    properties = [property_ for report in passed if report.when == "call" for property_ in report.user_properties]
    for name, what in properties:
        if name == _RECORDED:
            terminalreporter.write_line(f"hashbench: recorded {what}")
    if runs := [int(str(what)) for name, what in properties if name == _EQUAL_RUNS]:
        terminalreporter.write_line(_what_passing_proves(runs))
    for test in dict.fromkeys(what for name, what in properties if name == _DREW):
        terminalreporter.write_line(
            f"hashbench: {test} draws random numbers in eval(); its runs are equal because each starts from the same "
            "seed, and two calls in a row may differ"
        )


def _what_passing_proves(runs: Sequence[int]) -> str:
    """Format the bound of the check with the fewest equal runs: ``2 equal runs: up to 95 % of further runs …``."""
    from hashbench.core.diagnose.causes import stats
    from hashbench.core.text import count

    def bound(number: int) -> str:
        return f"{100 * stats.rate_of(0, number - 1, distinct=1, of='runs').high:.0f} %"

    fewest, most = min(runs), max(runs)
    said = f"{fewest} equal runs" if fewest == most else f"{fewest} to {most} equal runs"
    text = f"hashbench: {count(len(runs), 'check')} with {said}: up to {bound(fewest)} of further runs may still differ"
    lower = f"; hashbench_runs = {_MORE_RUNS} lowers this bound to {bound(_MORE_RUNS)}" if fewest < _MORE_RUNS else ""
    return f"{text} (95 % confidence){lower}"


@pytest.fixture(name=_MARKERS_OWN)
def _run_to_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunsEqual:
    return RunsEqual(request.node.nodeid, request.config, tmp_path_factory, request.node.user_properties)


# ------------------------------------------------------------------------------------------------------ the check


class RunsEqual:
    """``assert_runs_equal(function, *args, runs=2, **kwargs)`` runs ``function(*args, **kwargs)`` several times from
    the reset random state, each time on copies of the arguments, and fails where two runs differ in any bit.

    ``seed``, ``deterministic``, ``diagnose``, ``ops``, ``allow_empty``, ``tracer`` and ``stress`` are those of
    :class:`Options`; all else is the function's own. Compared are what it returns, its tensor arguments and their
    gradients, and the state of modules and optimizers among the arguments. Where it returns ``None``, what every op
    left is compared too.

    Returns:
        What the first run returned.
    """

    def __init__(
        self,
        test: str,
        config: pytest.Config,
        folders: pytest.TempPathFactory,
        properties: list[tuple[str, object]] | None = None,
    ) -> None:
        self._test, self._config, self._folders = test, config, folders
        self._properties = [] if properties is None else properties

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not callable(function):
            pytest.fail(f"{_FIXTURE} needs a function to run, not a {type(function).__name__}: pass it uncalled.")
        asked = {name: kwargs.pop(name) for name in _NAMES if name in kwargs}
        taken = sorted(asked.keys() & _parameters(function))
        if taken:
            pytest.fail(f"{taken[0]}= could be meant for the function too: bind it with functools.partial.")
        from hashbench.core.check.function import FunctionCall

        return self._examine(FunctionCall.of(function, args, kwargs), _name_of(function), _options(asked), marked=False)

    def marked_test(self, function: Callable[..., Any], fixtures: Mapping[str, Any], options: Options) -> None:
        """Run a marked test function with its fixtures."""
        __tracebackhide__ = True
        from hashbench.core.check.function import FunctionCall

        call = FunctionCall(function, (), fixtures, wholly=False)
        self._examine(call, self._test, options, marked=True)

    def _examine(self, call: FunctionCall, name: str, options: Options, *, marked: bool) -> Any:
        """Check a call and return the value of its first run. For a marked test every op is compared by default, and no
        line of the test is shown."""
        __tracebackhide__ = True
        from hashbench.core.catalog import Status
        from hashbench.core.check.function import check_function
        from hashbench.core.errors import HashbenchError
        from hashbench.core.extensions import failure, shown

        run_options = self.run_options(call, options)
        every_op, shows_line = marked if options.ops is None else options.ops, not marked
        drawn: list[str] = []
        try:
            row, value = check_function(
                call,
                name,
                run_options,
                every_op=every_op,
                allow_empty=options.allow_empty,
                quick_runs=_QUICK_RUNS,
                on_draw_in_eval=lambda: drawn.append(self._test),
            )
        except HashbenchError as error:
            message, shows_line = f"{name}: {error}", False
        else:
            row = shown(row)
            if row.accuracy == Status.PASS:
                self._properties.append((_EQUAL_RUNS, row.runs or 2))
                self._properties += [(_DREW, test) for test in drawn]
                return value
            message = str(failure(row, folder=self.folder))
        pytest.fail(message, pytrace=shows_line)

    def run_options(self, call: FunctionCall, options: Options, *, mode: str = "inference") -> RunOptions:
        """Return the options of the call's runs in this test."""
        from hashbench.core.check.function import device_of
        from hashbench.core.records import RunOptions

        return RunOptions(
            mode=mode,
            device=device_of(call),
            runs=options.runs or (_setting(self._config, "hashbench_runs") if _is_set(self._config) else None),
            seed=options.seed,
            deterministic=options.deterministic or "",
            replays=_setting(self._config, "hashbench_replays"),
            diagnose_budget=_setting(self._config, "hashbench_diagnose_budget") if options.diagnose else 0,
            tracer=options.tracer or _tracer(self._config),
            stress=options.stress,
            output=str(self.folder),
        )

    @functools.cached_property
    def folder(self) -> Path:
        """Folder for traces and repros of this test, created with the first one; existing files are kept."""
        name = _folder_name(self._test)
        asked = _asked_output(self._config)
        base = asked if asked is not None else self._folders.getbasetemp() / "hashbench"
        folders = (base / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())


SIZES = (1, 2, 8)
"""Default sizes that are compared with the whole batch, if smaller."""


class BatchInvariant:
    """``assert_batch_invariant(model, inputs, sizes=(1, 2, 8))`` calls the model, in ``eval`` mode, with its inputs and
    with the first 8, 2 and 1 items of them, each time from the reset random state and on a copy of the model, and fails
    where an item comes out otherwise in any bit.

    ``inputs`` are a tuple or list (positional arguments), a mapping (by name) or one tensor; the batch is the first
    dimension of all tensors among them, and those outputs are compared whose first dimension follows it. ``runs``,
    ``seed``, ``deterministic``, ``diagnose`` and ``tracer`` are those of :class:`Options`.

    ``invariance`` is what ``hashbench sweep --invariance`` takes, words in one text or several: with others than
    ``batch`` the items are computed again in another order, or the tokens of a mapping beside padding or after a
    cache; all of them are checked. ``tokens`` (``hashbench.core.run.workload.Tokens``) names the arguments for that,
    where they are not called as those of transformers.
    """

    def __init__(self, test: RunsEqual) -> None:
        self._test = test

    def __call__(
        self,
        model: Callable[..., Any],
        inputs: Any,
        *,
        sizes: Sequence[int] | None = None,
        invariance: str | Sequence[str] = "batch",
        tokens: Tokens | None = None,
        **asked: Any,
    ) -> None:
        __tracebackhide__ = True
        if not callable(model):
            pytest.fail(f"{_OF_BATCHES} needs a model to call, not a {type(model).__name__}.")
        from hashbench.core.catalog import INVARIANCES
        from hashbench.core.check.function import FunctionCall
        from hashbench.core.records import invariances_of
        from hashbench.core.run.workload import batch_of
        from hashbench.extensions.invariance.function import check_invariance

        try:
            invariances = invariances_of(
                [word.strip() for word in invariance.split(",")] if isinstance(invariance, str) else invariance
            )
        except ValueError as error:
            pytest.fail(f"invalid invariance {invariance!r}: {error}")
        if not invariances:
            pytest.fail("invariance must not be empty")
        if sizes is not None and "batch" not in invariances:
            pytest.fail(f"sizes= requires invariance 'batch', got {invariance!r}")
        if tokens is not None and not any(
            INVARIANCES[f"{invariance}-invariance"].unit == "tokens" for invariance in invariances
        ):
            pytest.fail(f"tokens= requires an invariance of tokens (padding, decode), got {invariance!r}")
        call, name = FunctionCall.of(model, *_given(inputs)), _name_of(model)
        batch = batch_of(inputs, None) or 0
        chosen = [size for size in SIZES if size < batch] if sizes is None else [n for n in sizes if n != batch]
        messages = []
        for each in invariances:
            options = self._test.run_options(call, _options(asked), mode=f"{each}-invariance")
            check = functools.partial(check_invariance, call, name, options, sizes=chosen, tokens=tokens)
            messages.append(self._failure(name, check))
        if any(messages):
            pytest.fail("\n\n".join(filter(None, messages)))

    def _failure(self, name: str, check: Callable[[], Row]) -> str:
        """Return what a check found, or why it cannot be made; "" if nothing differs."""
        from hashbench.core.catalog import Status
        from hashbench.core.errors import HashbenchError
        from hashbench.core.extensions import failure

        __tracebackhide__ = True
        try:
            row = check()
        except HashbenchError as error:
            return f"{name}: {error}"
        if row.accuracy == Status.SKIPPED:
            return f"{name}: {row.error}"
        return "" if row.accuracy == Status.PASS else str(failure(row, folder=self._test.folder))


_OWN = ("backend", "training", "loss", "tolerance")


class CompiledEqualsEager:
    """``assert_compiled_equals_eager(model, inputs)`` compiles the model and fails where a result is beyond the
    tolerance of PyTorch's harness, or where something that the compiler made computes something else in float64, too,
    also if all results are within it.

    ``model`` is a module or any function; ``inputs`` are a tuple or list (positional arguments), a mapping (by name) or
    one tensor. ``backend`` is that of ``torch.compile``. With ``training`` a loss is differentiated and gradients,
    parameters and buffers are compared; ``None``: if the model is in ``train()`` mode and has parameters that require
    gradients. ``loss`` gets the output and returns a scalar; ``None``: the mean of all outputs. ``tolerance`` is
    absolute and relative; ``None``: that of the harness. ``seed``, ``deterministic``, ``diagnose`` and ``tracer`` are
    those of :class:`Options`.
    """

    def __init__(self, test: RunsEqual) -> None:
        self._test = test

    def __call__(
        self,
        model: Callable[..., Any],
        inputs: Any,
        *,
        backend: str = "inductor",
        training: bool | None = None,
        loss: Callable[[Any], Any] | None = None,
        tolerance: float | None = None,
        **asked: Any,
    ) -> None:
        __tracebackhide__ = True
        if not callable(model):
            pytest.fail(f"{_OF_COMPILED} needs a model to call, not a {type(model).__name__}.")
        _refuse_others(_OF_COMPILED, asked, ("seed", "deterministic", "diagnose", "tracer"), *_OWN)
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            pytest.fail(f"tolerance must be a number >= 0, got {tolerance!r}")
        from hashbench.core.check.function import FunctionCall
        from hashbench.core.errors import HashbenchError
        from hashbench.extensions.compiled.failure import accuracy_finding, is_wrong
        from hashbench.extensions.compiled.function import check_compiled, is_trained

        trained = is_trained(model) if training is None else training
        call, name = FunctionCall.of(model, *_given(inputs)), _name_of(model)
        options = self._test.run_options(call, _options(asked), mode="training" if trained else "inference")
        options = dataclasses.replace(options, backend=backend, runs=2)
        try:
            row = check_compiled(model, inputs, name, options, loss=loss, tolerance=tolerance)
        except HashbenchError as error:
            message = f"{name}: {error}"
        else:
            message = str(accuracy_finding(row, folder=self._test.folder)) if is_wrong(row) else ""
        if message:
            pytest.fail(message)


class RanksDeterministic:
    """``assert_ranks_deterministic(factory, ranks=2)`` starts ``ranks`` processes with a process group of
    ``torch.distributed``, runs the model of the factory twice on them, and fails where two runs differ on any rank in
    any bit, or parameters that must be replicas differ between ranks; the message names rank and kernel.

    ``factory`` is a function of a module, which every rank imports: called without arguments for every run, it returns
    ``(module, example_inputs)`` or a ``hashbench.Workload``. With ``training`` it is trained: loss, gradients and
    parameters are compared, too. ``device`` is that of the model. ``runs``, ``seed``, ``deterministic``, ``diagnose``
    and ``tracer`` are those of :class:`Options`.
    """

    def __init__(self, test: RunsEqual) -> None:
        self._test = test

    def __call__(
        self,
        factory: Callable[[], Any],
        *,
        ranks: int = 2,
        training: bool = True,
        device: str = "cpu",
        **asked: Any,
    ) -> None:
        __tracebackhide__ = True
        if not callable(factory):
            pytest.fail(f"{_OF_RANKS} needs a function that builds a model, not a {type(factory).__name__}.")
        if type(ranks) is not int or ranks < 1:
            pytest.fail(f"ranks must be an int >= 1, got {ranks!r}")
        taken = ("runs", "seed", "deterministic", "diagnose", "tracer")
        _refuse_others(_OF_RANKS, asked, taken, "ranks", "training", "device")
        from hashbench.core.catalog import Status
        from hashbench.core.check.function import FunctionCall
        from hashbench.core.errors import HashbenchError
        from hashbench.core.extensions import failure
        from hashbench.extensions.ranks.function import check_ranks

        options = self._test.run_options(
            FunctionCall(factory), _options(asked), mode="training" if training else "inference"
        )
        options = dataclasses.replace(options, device=device, runs=options.runs or 2)
        try:
            row = check_ranks(factory, _name_of(factory), options, ranks=ranks)
        except HashbenchError as error:
            message = f"{_name_of(factory)}: {error}"
        else:
            message = "" if row.accuracy == Status.PASS else str(failure(row, folder=self._test.folder))
        if message:
            pytest.fail(message)


class KernelsUnchanged:
    """``assert_kernels_unchanged(model, inputs, "base.json")`` calls the model with its inputs once to see which
    kernels it calls, runs each that the file has on the synthetic inputs of ``hashbench fingerprint``, and fails where
    one gives something else than the file says, or where the model calls other kernels.

    With ``--hashbench-record`` the file is written instead. ``model`` is a module or any function; ``inputs`` are a
    tuple or list (positional arguments), a mapping (by name) or one tensor. A relative path is one from the folder of
    the test's file. ``threads`` are torch's; ``None``: as many as when it was recorded. ``name`` is what the file calls
    the model; ``None``: its class, or the function's name. ``seed``, ``deterministic`` and ``tracer`` are those of
    :class:`Options`.
    """

    def __init__(self, item: pytest.Item, test: RunsEqual) -> None:
        self._item, self._test = item, test

    def __call__(
        self,
        model: Callable[..., Any],
        inputs: Any,
        file: str | os.PathLike[str],
        *,
        threads: int | None = None,
        name: str | None = None,
        **asked: Any,
    ) -> None:
        __tracebackhide__ = True
        if not callable(model):
            pytest.fail(f"{_OF_KERNELS} needs a model to call, not a {type(model).__name__}.")
        _refuse_others(_OF_KERNELS, asked, ("seed", "deterministic", "tracer"), "threads", "name")
        if threads is not None and (type(threads) is not int or threads < 1):
            pytest.fail(f"threads must be an int >= 1, got {threads!r}")
        from hashbench.core.check.function import FunctionCall
        from hashbench.core.errors import HashbenchError
        from hashbench.extensions.fingerprint.check import changed_kernels, record_function

        call, path = FunctionCall.of(model, *_given(inputs)), self._item.path.parent / file
        named = name or _name_of(model)
        options = dataclasses.replace(self._test.run_options(call, _options(asked)), threads=threads)
        try:
            if self._item.config.getoption(_RECORD):
                what = record_function(call, named, options, path)
                self._item.user_properties.append((_RECORDED, f"{file}: {named}, {what}"))
                return
            if not path.exists():
                message = f"{named}: there is no {file}, so nothing was compared. Record it: `pytest {_RECORD}`."
            else:
                found = changed_kernels(call, named, options, path, keep=self._keep)
                message = "" if found is None else str(found)
        except HashbenchError as error:
            message = f"{named}: {error}"
        if message:
            pytest.fail(message)

    def _keep(self, text: str) -> str:
        path = self._test.folder / "kernels.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
        return os.path.relpath(path)


# ------------------------------------------------------------------------------------------------------- options


def _given(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call whose inputs are a tuple or list, a mapping or one tensor."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (list, tuple)) else [inputs]), {}


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).replace("<locals>.", "")


def _setting(config: pytest.Config, name: str) -> Any:
    """Return the value of an option of ``pytest.ini``."""
    kind, default, least, _ = _INI[name]
    text = str(config.getini(name)).strip()
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise pytest.UsageError(f"{name} must be a number, got {text}") from None
    if not least <= value < float("inf"):
        raise pytest.UsageError(f"{name} must be >= {least}, got {text}")
    return value


def _is_set(config: pytest.Config) -> bool:
    return bool(str(config.getini("hashbench_runs")).strip())


def _tracer(config: pytest.Config) -> str:
    """Return ``hashbench_tracer`` of ``pytest.ini``."""
    tracer = str(config.getini("hashbench_tracer")).strip() or "auto"
    if tracer not in _TRACERS:
        raise pytest.UsageError(f"hashbench_tracer must be {', '.join(_TRACERS)}, got {tracer}")
    return tracer


def _asked_output(config: pytest.Config) -> Path | None:
    asked = config.getoption("--hashbench-output")
    return None if asked is None else config.invocation_params.dir / asked


def _options_of(mark: pytest.Mark) -> Options:
    if mark.args:
        pytest.fail(f"{MARKER} takes its options by name: {MARKER}(runs={mark.args[0]!r})", pytrace=False)
    return _options(mark.kwargs)


def _options(asked: Mapping[str, Any]) -> Options:
    unknown = sorted(asked.keys() - set(_NAMES))
    if unknown:
        pytest.fail(f"{MARKER} has no option {unknown[0]}; it has {', '.join(_NAMES)}", pytrace=False)
    try:
        return Options(**asked)
    except ValueError as error:
        wrong = str(error)
    pytest.fail(wrong, pytrace=False)


def _refuse_others(check: str, asked: Mapping[str, Any], taken: Sequence[str], *own: str) -> None:
    """Fail if an option is asked for that a check does not take."""
    __tracebackhide__ = True
    if others := sorted(asked.keys() - set(taken)):
        pytest.fail(f"{check} has no option {others[0]}; it has {', '.join((*own, *taken))}")


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that a function declares."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins do not tell
        return set()


def _folder_name(test: str) -> str:
    """Return a short file name that is unique to the test and the worker of pytest-xdist."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    digest = hashlib.sha256(f"{test}{worker}".encode(errors="surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", test.rpartition("/")[2])[:60]
    return f"{plain}-{digest}"
