"""The pytest plug-in: ``assert_runs_equal``, ``@pytest.mark.run_to_run``, ``assert_batch_invariant``,
``assert_compiled_equals_eager``, ``assert_ranks_deterministic``, ``assert_kernels_unchanged``, ``assert_same_model``,
``assert_same_weights``, ``assert_within_rounding``.

pytest loads this module in every session of every project that has hashbench installed, so it imports little but
pytest; torch and the rest of hashbench are imported by the first test that asks for them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import pytest

from hashbench.integrations.pytest.running import INI, RECORD, asked_output, asserts_of, setting_of, tracer_of
from hashbench.testing.asserts import DREW, EQUAL_RUNS, RECORDED, Asserts
from hashbench.testing.options import SEED, TRACERS, CheckFailedError, options_of, why_no_folder

MARKER = "run_to_run"
_TEST = "_hashbench_test"
"""Fixture behind all others, under a name that no conftest.py overrides."""
_MORE_RUNS = 21
"""Runs that the summary suggests."""


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
    if output is not None and (wrong := why_no_folder(output)):
        raise pytest.UsageError(f"--hashbench-output: {wrong}")


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
    if inspect.iscoroutinefunction(function):
        pytest.fail(f"{MARKER} cannot run a coroutine: mark a plain function that awaits it.", pytrace=False)
    test = cast(Asserts, pyfuncitem.funcargs[_TEST])
    called = []

    @functools.wraps(function)
    def several_times(**fixtures: Any) -> None:
        called.append(True)
        __tracebackhide__ = True
        _run_marked(test, pyfuncitem.nodeid, function, fixtures, mark)

    pyfuncitem.obj = several_times
    try:
        outcome = yield
    finally:
        pyfuncitem.obj = function
    if not called:
        pytest.fail(f"{MARKER}: another plug-in ran the test in its own way, once.", pytrace=False)
    return outcome


@pytest.fixture
def _hashbench_test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asserts:
    return asserts_of(request.node, tmp_path_factory)


@pytest.fixture
def assert_runs_equal(_hashbench_test: Asserts) -> Callable[..., Any]:
    """Return a callable that takes a function and its arguments, and fails if two runs of it differ."""
    return _fixture(_hashbench_test, "assert_runs_equal")


@pytest.fixture
def assert_batch_invariant(_hashbench_test: Asserts) -> Callable[..., Any]:
    """Return a callable that takes a model and its inputs, and fails if an item differs in a smaller batch."""
    return _fixture(_hashbench_test, "assert_batch_invariant")


@pytest.fixture
def assert_compiled_equals_eager(_hashbench_test: Asserts) -> Callable[..., Any]:
    """Return a callable that takes a model and its inputs, and fails if ``torch.compile`` changes what it computes."""
    return _fixture(_hashbench_test, "assert_compiled_equals_eager")


@pytest.fixture
def assert_ranks_deterministic(_hashbench_test: Asserts) -> Callable[..., Any]:
    """Return a callable that takes a function which builds a model, and fails if two runs on several ranks differ."""
    return _fixture(_hashbench_test, "assert_ranks_deterministic")


@pytest.fixture
def assert_kernels_unchanged(_hashbench_test: Asserts) -> Callable[..., Any]:
    """Return a callable that takes a model, its inputs and a file, and fails if a kernel differs from the file."""
    return _fixture(_hashbench_test, "assert_kernels_unchanged")


@pytest.fixture
def assert_same_model() -> Callable[..., None]:
    """Return a callable that takes two models and inputs, and fails if they do not compute the same function."""
    from hashbench.testing import assert_same_model as check

    return check


@pytest.fixture
def assert_same_weights() -> Callable[..., None]:
    """Return a callable that takes two models or state dicts, and fails if they do not hold the same weights."""
    from hashbench.testing import assert_same_weights as check

    return check


@pytest.fixture
def assert_within_rounding() -> Callable[..., None]:
    """Return a callable that takes a kernel, its reference and inputs, and fails if more than rounding differs."""
    from hashbench.testing import assert_within_rounding as check

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was recorded and what equal runs may have missed, also for the workers of pytest-xdist."""
    passed = terminalreporter.getreports("passed")
    properties = [property_ for report in passed if report.when == "call" for property_ in report.user_properties]
    for name, what in properties:
        if name == RECORDED:
            terminalreporter.write_line(f"hashbench: recorded {what}")
    if runs := [int(str(what)) for name, what in properties if name == EQUAL_RUNS]:
        terminalreporter.write_line(_what_passing_proves(runs))
    for test in dict.fromkeys(what for name, what in properties if name == DREW):
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


# ------------------------------------------------------------------------------------------------------ the checks


def _fixture(test: Asserts, name: str) -> Callable[..., Any]:
    """Return a check of a test, which fails as pytest shows it: by its text and the line of the test."""
    check = getattr(test, name)

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return _failing(lambda: check(*args, **kwargs), pytrace=True)

    return call


def _failing(check: Callable[[], Any], *, pytrace: bool) -> Any:
    """Return what a check returns, or fail with its text; ``pytrace``: and with the line of the test."""
    __tracebackhide__ = True
    try:
        return check()
    except CheckFailedError as error:
        message = str(error)
    pytest.fail(message, pytrace=pytrace)  # not in the handler, whose exception would be shown as well


def _run_marked(test: Asserts, nodeid: str, function: Callable[..., Any], fixtures: Any, mark: pytest.Mark) -> None:
    """Run a marked test function several times; every op is compared by default, and no line of the test is shown."""
    __tracebackhide__ = True
    from hashbench.core.check.function import FunctionCall

    def check() -> Any:
        if mark.args:
            raise CheckFailedError(f"{MARKER} takes its options by name: {MARKER}(runs={mark.args[0]!r})")
        options = options_of(mark.kwargs, test.defaults, of=MARKER)
        call = FunctionCall(function, (), fixtures, wholly=False)
        return test.check_call(call, nodeid, options, every_op=options.ops is not False)

    _failing(check, pytrace=False)
