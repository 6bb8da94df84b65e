"""The pytest plug-in: ``assert_runs_equal``, ``@pytest.mark.run_to_run``, ``assert_batch_invariant``,
``assert_compiled_equals_eager``, ``assert_ranks_deterministic`` and ``assert_kernels_unchanged``.

pytest loads this module in every session of every project that has hashbench installed, so it imports little but
pytest; torch and the rest of hashbench are imported by the first test that asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pytest

from hashbench.integrations.pytest.running import (
    INI,
    RECORD,
    RECORDED,
    SEED,
    TRACERS,
    Options,
    RunningTest,
    asked_output,
    name_of,
    setting_of,
    tracer_of,
)

if TYPE_CHECKING:
    from hashbench.core.check.function import FunctionCall

MARKER = "run_to_run"
_TEST = "_hashbench_test"
"""Fixture behind all others, under a name that no conftest.py overrides."""
_EQUAL_RUNS = "hashbench_equal_runs"
_DREW = "hashbench_drew_in_eval"
_QUICK_RUNS, _MORE_RUNS = 5, 21
"""Default runs of a function that takes milliseconds, and what the summary suggests."""


_NAMES = tuple(field.name for field in dataclasses.fields(Options))


_EVERY = ("seed", "deterministic", "diagnose", "tracer")
_CHECKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "assert_batch_invariant": ("runs", *_EVERY),
        "assert_compiled_equals_eager": _EVERY,
        "assert_ranks_deterministic": ("runs", *_EVERY),
        "assert_kernels_unchanged": ("seed", "deterministic", "tracer"),
    }
)
"""Fixture, which is a function of :mod:`hashbench.integrations.pytest.checks` → the options of a run that it takes."""
_NEEDS = MappingProxyType({"model": "a model to call", "factory": "a function that builds a model"})


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
        RECORD,
        action="store_true",
        help="have assert_kernels_unchanged write its files, also where they are there, instead of comparing with them",
    )
    for name, (_, default, _, text) in INI.items():
        parser.addini(name, f"{text} (default {default:g})", default="")
    parser.addini("hashbench_tracer", f"what records the ops: {', '.join(TRACERS)} (default auto)", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and validate the options."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(runs=None, seed={SEED}, deterministic=None, diagnose=True, ops=True, allow_empty=False, "
        "tracer=None, stress=False): "
        "run the test several times from one random state; what it returns and what every torch op leaves must be "
        "the same bit by bit.",
    )
    for name in INI:
        setting_of(config, name)
    tracer_of(config)
    output = asked_output(config)
    if output is not None:
        existing = next(path for path in (output, *output.parents) if path.exists())
        if not existing.is_dir():
            raise pytest.UsageError(f"--hashbench-output: {existing} is not a folder")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Request the fixture for marked tests."""
    if isinstance(item, pytest.Function) and item.get_closest_marker(MARKER) is not None:
        item.fixturenames.append(_TEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the native tracer if tests will use it, so that no test waits for it; only one of several processes
    does."""
    config = session.config
    uses = any(_TEST in getattr(item, "fixturenames", ()) for item in session.items)
    if uses and not config.option.collectonly and tracer_of(config) != "python":
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
    check = RunsEqual(cast(RunningTest, pyfuncitem.funcargs[_TEST]))
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
def _hashbench_test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunningTest:
    return RunningTest(request.node, tmp_path_factory)


@pytest.fixture
def assert_runs_equal(_hashbench_test: RunningTest) -> RunsEqual:
    """Return a callable that takes a function and its arguments, and fails if two runs of it differ."""
    return RunsEqual(_hashbench_test)


@pytest.fixture
def assert_batch_invariant(_hashbench_test: RunningTest) -> Asserts:
    """Return a callable that takes a model and its inputs, and fails if an item differs in a smaller batch."""
    return Asserts("assert_batch_invariant", _hashbench_test)


@pytest.fixture
def assert_compiled_equals_eager(_hashbench_test: RunningTest) -> Asserts:
    """Return a callable that takes a model and its inputs, and fails if ``torch.compile`` changes what it computes."""
    return Asserts("assert_compiled_equals_eager", _hashbench_test)


@pytest.fixture
def assert_ranks_deterministic(_hashbench_test: RunningTest) -> Asserts:
    """Return a callable that takes a function which builds a model, and fails if two runs on several ranks differ."""
    return Asserts("assert_ranks_deterministic", _hashbench_test)


@pytest.fixture
def assert_kernels_unchanged(_hashbench_test: RunningTest) -> Asserts:
    """Return a callable that takes a model, its inputs and a file, and fails if a kernel differs from the file."""
    return Asserts("assert_kernels_unchanged", _hashbench_test)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was recorded and what equal runs may have missed, also for the workers of pytest-xdist."""
    passed = terminalreporter.getreports("passed")
    properties = [property_ for report in passed if report.when == "call" for property_ in report.user_properties]
    for name, what in properties:
        if name == RECORDED:
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

    def __init__(self, test: RunningTest) -> None:
        self._test = test

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not callable(function):
            pytest.fail(
                f"assert_runs_equal needs a function to run, not a {type(function).__name__}: pass it uncalled."
            )
        asked = {name: kwargs.pop(name) for name in _NAMES if name in kwargs}
        taken = sorted(asked.keys() & _parameters(function))
        if taken:
            pytest.fail(f"{taken[0]}= could be meant for the function too: bind it with functools.partial.")
        from hashbench.core.check.function import FunctionCall

        return self._examine(FunctionCall.of(function, args, kwargs), name_of(function), _options(asked), marked=False)

    def marked_test(self, function: Callable[..., Any], fixtures: Mapping[str, Any], options: Options) -> None:
        """Run a marked test function with its fixtures."""
        __tracebackhide__ = True
        from hashbench.core.check.function import FunctionCall

        call = FunctionCall(function, (), fixtures, wholly=False)
        self._examine(call, self._test.item.nodeid, options, marked=True)

    def _examine(self, call: FunctionCall, name: str, options: Options, *, marked: bool) -> Any:
        """Check a call and return the value of its first run. For a marked test every op is compared by default, and no
        line of the test is shown."""
        __tracebackhide__ = True
        from hashbench.core.catalog import Status
        from hashbench.core.check.function import check_function
        from hashbench.core.errors import HashbenchError
        from hashbench.core.extensions import failure, shown

        run_options = self._test.run_options(call, options)
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
                on_draw_in_eval=lambda: drawn.append(self._test.item.nodeid),
            )
        except HashbenchError as error:
            message, shows_line = f"{name}: {error}", False
        else:
            row = shown(row)
            if row.accuracy == Status.PASS:
                self._test.item.user_properties.append((_EQUAL_RUNS, row.runs or 2))
                self._test.item.user_properties += [(_DREW, test) for test in drawn]
                return value
            message = str(failure(row, folder=self._test.folder))
        pytest.fail(message, pytrace=shows_line)


class Asserts:
    """``assert_…(model, inputs, …)`` of :data:`_CHECKS`: it fails with what its check says, if that says anything."""

    def __init__(self, name: str, test: RunningTest) -> None:
        self._name, self._test = name, test

    def __call__(self, *given: Any, **named: Any) -> None:
        __tracebackhide__ = True
        from hashbench.core.errors import HashbenchError
        from hashbench.integrations.pytest import checks

        function, options = getattr(checks, self._name), _CHECKS[self._name]
        signature = inspect.signature(function)
        asked = {name: named.pop(name) for name in sorted(named.keys() - signature.parameters.keys())}
        subject = signature.bind(self._test, None, *given, **named).args[2]
        if not callable(subject):
            needs = next(words for name, words in _NEEDS.items() if name in signature.parameters)
            pytest.fail(f"{self._name} needs {needs}, not a {type(subject).__name__}.")
        if others := sorted(asked.keys() - set(options)):
            own = (each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY)
            pytest.fail(f"{self._name} has no option {others[0]}; it has {', '.join((*own, *options))}")
        try:
            message = function(self._test, _options(asked), *given, **named)
        except HashbenchError as error:
            message = f"{named.get('name') or name_of(subject)}: {error}"
        if message:
            pytest.fail(message)


# ------------------------------------------------------------------------------------------------------- options


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


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that a function declares."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins do not tell
        return set()
