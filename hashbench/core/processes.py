"""Run child processes: start, wait with a time limit, kill with all descendants, and describe how they ended.

Also memory limits, progress phases, time budgets, temporary environment variables, and Ctrl-C deferred to safe points.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic, process_time, sleep
from types import FrameType, MappingProxyType
from typing import IO, Never

import psutil

from hashbench.core.errors import last_line
from hashbench.core.io import PACKAGE_PARENT, PIPE_SECONDS, open_file, write_within
from hashbench.core.owners import is_users

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

_LAST_WAIT = 10.0
"""Seconds for a killed process to disappear; only one stuck in the kernel needs longer."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
"""A call in a dump of ``faulthandler``."""

_POLL_SECONDS = 0.01

_CALL = """
import pkgutil, sys
package, target, *arguments = sys.argv[1:]
sys.argv[1:] = arguments
sys.path.append(package)
sys.exit(pkgutil.resolve_name(target)(*arguments))
"""
_LAUNCHER = """
import ctypes, os, select, signal, sys
asked = int(sys.argv.pop(1))
try:
    library = ctypes.CDLL(None)
    library.prctl(1, signal.SIGKILL)  # the parent may end at any moment, and an extension may hold the interpreter lock
except (AttributeError, OSError):
    pass  # not Linux
if asked >= 0:
    waiting = select.poll()
    waiting.register(asked, select.POLLIN)
    waiting.register(0, 0)  # the end of the parent
    if any(descriptor == 0 for descriptor, _ in waiting.poll()):
        sys.exit()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A launcher that execs the actual Python, at once or on request, and is killed when its parent's thread ends."""

_GUARD = """
import ctypes, os, resource, select, signal, sys, time
lifeline, failure, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.set_inheritable(failure, False)
try:
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here, also those in sessions of their own
except (AttributeError, OSError):
    prctl = None  # not Linux
wakes, woken = os.pipe()
os.set_blocking(woken, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(woken)
ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
us, child = os.getpid(), os.fork()
if not child:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # which Python has changed
        signal.signal(number, signal.SIG_DFL)
    os.close(lifeline)
    if prctl is not None:
        prctl(1, signal.SIGKILL)
        if os.getppid() != us:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(failure, str(error.errno).encode())
        os._exit(1)
os.close(failure)
for number in ours:
    signal.signal(number, signal.SIG_IGN)  # the child has got them as well; one for it alone comes through the lifeline

def reap(ended):
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended = found[1] if found[0] == child else ended
    except ChildProcessError:
        return ended, True
    return ended, False

def children():
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == us:
                    yield int(name)
        except OSError:
            pass

ended = None
while ended is None:
    ready = select.select([lifeline, wakes], [], [])[0]
    if wakes in ready:
        os.read(wakes, 4096)
        ended, _ = reap(ended)
    if lifeline in ready and ended is None:
        asked = os.read(lifeline, 64)
        if not asked:
            break
        for number in asked:
            os.kill(child, number)
until, all_gone = time.monotonic() + 10, False
while not all_gone and time.monotonic() < until:  # one generation after the other
    try:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        if ended is None:
            os.kill(child, signal.SIGKILL)
    ended, all_gone = reap(ended)
    if not all_gone:
        time.sleep(0.005)
if ended is not None and os.WIFSIGNALED(ended):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(ended)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(us, number)
os._exit(1 if ended is None else os.WEXITSTATUS(ended))
"""
"""A guard around a command. It kills the command and all its descendants when the pipe behind ``lifeline`` is closed,
as by the end of our process, however that ended, and what the command leaves when it ends. A byte that comes through
the pipe is a signal for the command. It ends as the command did."""


def python_calling(
    target: str, *arguments: str, dies_with_us: bool = False, asked: int = -1, safe_path: bool = True
) -> list[str]:
    """Return the command line of a new Python that calls ``module:function`` of this package and exits with its result.

    Args:
        target: ``module:function``.
        arguments: its arguments, also ``sys.argv[1:]``.
        dies_with_us: the kernel kills the child when this thread ends (Linux).
        asked: with ``dies_with_us``, an inherited descriptor; the child starts once it is readable. Its standard input
            is a pipe, whose end terminates it.
        safe_path: use ``-P``, so that a folder called torch in the working directory is not imported.
    """
    command = [*(["-P"] if safe_path else []), "-c", _CALL, PACKAGE_PARENT, target, *arguments]
    return [sys.executable, *(["-P", "-c", _LAUNCHER, str(asked)] if dies_with_us else []), *command]


def import_or_call(names: Iterable[str]) -> None:
    """Import the modules and call the functions (``module:function``) named, ignoring errors.

    An error recurs where the import is needed, and is reported there.
    """
    for name in names:
        with contextlib.suppress(Exception):
            if callable(found := resolve_name(name)):
                found()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector. Importing torch is a sixth faster without it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def older_objects_uncollected() -> Iterator[None]:
    """Restrict garbage collection to objects created inside: 200,000 of a model library take 0.15 s per collection.

    If older objects are already frozen permanently, as in a sweep's worker, they stay frozen.
    """
    gc.collect()
    for_good = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not for_good:
            gc.unfreeze()


class Child:
    """A child process, killed with all its descendants on leaving the context.

    Args:
        command: program and arguments.
        task: text for its standard input, which then stays open as long as this process lives (see
            :func:`end_with_input`).
        stdin: its standard input without a task; default: empty.
        stdout: a file, or what :class:`subprocess.Popen` takes, like ``stderr``. Pipes are not read here.
        stderr: destination of errors.
        environment: additional variables.
        own_session: shield it from Ctrl-C at the terminal; else it shares our process group.
        handed: descriptors that it inherits.
        cwd: its working directory; default: ours.
        guarded: all of it ends with this process, also when that is killed by SIGKILL, and what it has started in
            sessions of its own. For a command that does not watch its parent; costs 20 ms.

    Raises:
        OSError: it cannot be started; of a guarded command, the guard.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        task: str = "",
        stdout: int | IO[bytes] | None = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        stdin: int | None = subprocess.DEVNULL,
        environment: Mapping[str, str] = NO_VARIABLES,
        own_session: bool = True,
        handed: Sequence[int] = (),
        cwd: Path | None = None,
        guarded: bool = False,
    ) -> None:
        self._own_session, self._lifeline = own_session, -1

        def started(command: Sequence[str], handed: Sequence[int]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if task else stdin,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment},
                start_new_session=own_session,
                pass_fds=handed,
                cwd=cwd,
            )

        self._process = self._under_guard(started, command, handed) if guarded else started(command, handed)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            with contextlib.suppress(OSError):  # it died at once, or never reads: its status tells, or its time limit
                write_within(self._process.stdin.fileno(), task.encode(), seconds=PIPE_SECONDS)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def status(self) -> int | None:
        """Return its exit status, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait, at most ``seconds``, and return its exit status; ``None`` if it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send it a signal, by default that of Ctrl-C."""
        if self._lifeline < 0:
            self._process.send_signal(number)
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._lifeline, bytes([number]))

    def end(self) -> None:
        """Kill it, unless it has ended, and all processes it has left behind."""
        if self._let_go():
            self.wait(_LAST_WAIT)
        end_family(self._process.pid, group=self._own_session, running=self._process.poll() is None)
        self.wait(_LAST_WAIT)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _under_guard(
        self,
        started: Callable[[Sequence[str], Sequence[int]], subprocess.Popen[bytes]],
        command: Sequence[str],
        handed: Sequence[int],
    ) -> subprocess.Popen[bytes]:
        """Start a guard, and wait until it has started the command."""
        (end, self._lifeline), (failure, report) = os.pipe(), os.pipe()
        try:
            guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(end), str(report), *command]
            process = started(guard, (*handed, end, report))
            os.close(report)
            report = -1
            number = int(os.read(failure, 16) or 0)
        except OSError:
            self._let_go()
            raise
        finally:
            for descriptor in (end, failure, report):
                if descriptor >= 0:
                    os.close(descriptor)
        if number:
            self._let_go()
            process.wait(_LAST_WAIT)
            raise OSError(number, os.strerror(number), command[0])
        return process

    def _let_go(self) -> bool:
        """Have the guard kill all of it; return False if there is none."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        return lifeline >= 0


def end_family(pid: int, *, group: bool = True, running: bool = True) -> None:
    """Kill a process and its descendants.

    Args:
        pid: of the process.
        group: also kill the process group that it leads or led.
        running: false if it has ended, since its pid may have been reused.
    """
    try:
        family = [psutil.Process(pid)] if running else []
        family += [child for process in family for child in process.children(recursive=True)]
    except psutil.Error:
        family = []
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


def watched(pid: int | None) -> psutil.Process | None:
    """Return the process, safe against reuse of its number; ``None`` if it is gone already."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def has_ended(process: psutil.Process | None) -> bool:
    """Return True if it is gone or a zombie."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        return process is None or not process.is_running() or process.status() in ended
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process: psutil.Process | None, seconds: float) -> bool:
    """Wait for a killed process, of any parent, to end; return False if it is still there after ``seconds``."""
    deadline = monotonic() + seconds
    while not has_ended(process) and monotonic() < deadline:
        sleep(_POLL_SECONDS)
    return has_ended(process)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended.

    Attributes:
        status: exit status, negative for a signal; ``None`` on timeout.
        stdout: its output.
        stderr: its errors.
    """

    status: int | None
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of its errors, or its exit status."""
        return last_line(self.stderr) or f"exit code {self.status}"


def run(
    command: Sequence[str],
    *,
    seconds: float,
    environment: Mapping[str, str] = NO_VARIABLES,
    own_session: bool = True,
) -> Finished:
    """Run a command for at most ``seconds`` with empty standard input; kill it and its descendants afterwards."""
    # Files, not pipes: what it has started may hold a pipe open.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with Child(
            command, stdout=stdout, stderr=stderr, environment=environment, own_session=own_session, guarded=True
        ) as child:
            status = child.wait(seconds)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Finished(status, *texts)


def new_python(code: str, *arguments: str, seconds: float) -> Finished:
    """Run ``python -P -c CODE ARGUMENTS`` for at most ``seconds``, in our process group."""
    return run([sys.executable, "-P", "-c", code, *arguments], seconds=seconds, own_session=False)


class Budget:
    """A time budget in seconds, starting now. Keeps its own reference to ``monotonic``, out of reach of clock
    experiments."""

    def __init__(self, seconds: float) -> None:
        self._ends = monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds; negative if overdrawn."""
        return self._ends - monotonic()


class QuietBudget(Budget):
    """A time budget that excludes time spent waiting for a processor, up to ``most`` seconds of wall time."""

    def __init__(self, seconds: float, *, most: float) -> None:
        super().__init__(most)
        self._seconds, self._began, self._computed = seconds, monotonic(), process_time()

    def left(self) -> float:
        """Return the remaining seconds by wall or CPU time, whichever was used less."""
        used = min(monotonic() - self._began, process_time() - self._computed)
        return min(self._seconds - used, super().left())


# -------------------------------------------------------------------------------------------- what is done just now

_PHASE_LISTENER: ContextVar[Callable[[str], object] | None] = ContextVar("hashbench_phase_listener", default=None)


def tell_phase(phase: str) -> None:
    """Report the phase that this process enters, in a few words (``run 2 of 2``, ``experiments 12/26``)."""
    if (listener := _PHASE_LISTENER.get()) is not None:
        listener(phase)


@contextlib.contextmanager
def phases_told_to(listener: Callable[[str], object]) -> Iterator[None]:
    """Call ``listener`` with each phase that this thread enters."""
    token = _PHASE_LISTENER.set(listener)
    try:
        yield
    finally:
        _PHASE_LISTENER.reset(token)


_DRAFT_RECEIVER: ContextVar[Callable[[str], object] | None] = ContextVar("hashbench_draft_receiver", default=None)


def send_draft(text: str) -> None:
    """Send a draft of a row to the receiver, if any: this process cannot write the row's file."""
    if (receiver := _DRAFT_RECEIVER.get()) is not None:
        receiver(text)


@contextlib.contextmanager
def drafts_sent_to(receiver: Callable[[str], object]) -> Iterator[None]:
    """Call ``receiver`` with each draft that this thread sends."""
    token = _DRAFT_RECEIVER.set(receiver)
    try:
        yield
    finally:
        _DRAFT_RECEIVER.reset(token)


@contextlib.contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to the file ``path``; remove it if it stays empty.

    Raises:
        OSError: the file cannot be opened.
    """
    _flush()
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), "w", buffering=1) as log:
        standard = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in standard:
                os.dup2(log.fileno(), descriptor)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield
        finally:
            _flush()
            for descriptor, before in standard.items():
                os.dup2(before, descriptor)
                os.close(before)
            if os.fstat(log.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()


# --------------------------------------------------------------------------------------------------- in a child


def end_with_input(*, group: bool = True) -> None:
    """Give this process an empty standard input, and kill it, by default with its process group, when the real one
    closes."""
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    end_with(lifeline, group=group)


def end_with(lifeline: int, *, group: bool = True) -> None:
    """Kill this process, by default its group, when the pipe behind ``lifeline``, which has no writer but the parent,
    is closed.

    Uses a kernel signal if possible: a thread needs the GIL, which a hanging extension may hold, and makes memory
    addresses depend on its timing.
    """
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp() if group else os.getpid())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
            if not select.select([lifeline], [], [], 0)[0]:
                return
    threading.Thread(target=_kill_at_eof, args=(lifeline, group), name="hashbench lifeline", daemon=True).start()


def _kill_at_eof(lifeline: int, group: bool) -> None:
    while os.read(lifeline, 4096):
        pass
    os.kill(0 if group else os.getpid(), signal.SIGKILL)


def exit_at_once(status: int = 0) -> Never:
    """Exit without interpreter shutdown, which may wait for threads of a model or suite, and takes a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


# ----------------------------------------------------------------------------------------- environment, ends, Ctrl-C


@contextlib.contextmanager
def variables(wanted: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Set environment variables; restore them on exit. With ``unless_set``, existing ones take precedence."""
    changed = {name: value for name, value in wanted.items() if not (unless_set and name in os.environ)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def preserved_umask() -> Iterator[None]:
    """Restore the umask of this process on exit, so that files written later are readable."""
    before = os.umask(0o077)  # there is no other way to read it
    os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


_CONTROL_GROUPS = (
    # (limit, use, what counts as used but is given back when asked for), of version 2 and of version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_memory_mib() -> float:
    """Return the memory that new processes can take without swapping, in MiB.

    The minimum of psutil's ``available`` and the rest of the container's control group.
    """
    left = [float(psutil.virtual_memory().available)]
    for limit_file, use_file, cached in _CONTROL_GROUPS:
        try:
            limit, use = int(Path(limit_file).read_text()), int(Path(use_file).read_text())  # "max": there is none
            statistics = dict(line.split() for line in Path(use_file).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left.append(float(limit - use + int(statistics.get(cached, 0))))
    return max(0.0, min(left)) / 2**20


def return_free_memory() -> None:
    """Return freed memory that glibc keeps to the system. The next use of that memory is slower."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage / (2**20 if sys.platform == "darwin" else 2**10)


def describe_end(exit_code: int) -> str:
    """Describe an exit code; negative for a signal, as in :mod:`multiprocessing`."""
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL, which hashbench did not send: most likely the kernel was out of memory"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code} and no result"


def was_killed(text: str) -> bool:
    """Return True if a text begins with what :func:`describe_end` says of a process that something outside killed.

    >>> was_killed(describe_end(-signal.SIGKILL)), was_killed(describe_end(-signal.SIGSEGV))
    (True, False)
    """
    return any(text.startswith(describe_end(-number)) for number in (signal.SIGKILL, signal.SIGTERM))


def last_words(log: Path, *, lines: int = 4, most: int = 65536) -> list[str]:
    """Return the last lines that a dead worker printed, or the first of Python's fatal error."""
    try:
        with os.fdopen(open_file(log), "rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    words = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((index for index, line in enumerate(words) if line.startswith("Fatal Python error")), None)
    return words[-lines:] if fatal is None else words[fatal : fatal + lines]


def last_line_of_user(log: Path, *, most: int = 65536) -> str:
    """Return ``file:line function`` of the innermost call outside torch, hashbench and the standard library in the dump
    that Python wrote as the worker died; ``""`` if there is none."""
    try:
        with os.fdopen(open_file(log), "rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    dump = text[max(0, text.find("Current thread")) :].partition("(most recent call first):\n")[2].partition("\n\n")[0]
    users = (call for call in _FRAME.finditer(dump) if is_users(call["file"]))
    return next((f"{Path(call['file']).name}:{call['line']} {call['function']}" for call in users), "")


class Interrupts:
    """Context in which Ctrl-C raises ``KeyboardInterrupt`` only inside :meth:`allowed`.

    Elsewhere it is deferred to the next :meth:`allowed`, so that no file or child process is left half made. Has no
    effect outside the main thread and in a process that ignores SIGINT.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._pending = False
        self._installed = False

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGINT)
        if in_main_thread and callable(self._before):
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` if Ctrl-C was or is pressed."""
        self._waiting = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._pending = True
        if self._waiting:
            raise KeyboardInterrupt
