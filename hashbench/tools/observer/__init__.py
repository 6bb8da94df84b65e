"""Record hashes in one run, check them in another process, another day.

>>> with ObserverContext(dump_dir, "reference") as observer:
...     observe("output", model(inputs))
>>> with ObserverContext(dump_dir, "check", reference_hash_file=f"{dump_dir}/reference.json") as observer:
...     observe("output", model(inputs))
>>> observer.mismatches
{}
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.tools.observer import files
from hashbench.tools.observer.files import read as read_recording
from hashbench.tools.observer.observer import HashMode, MismatchError, Observer, log
from hashbench.tools.observer.recording import Kind, Mismatch

__all__ = [
    "HashMode",
    "Kind",
    "Mismatch",
    "MismatchError",
    "Observer",
    "ObserverContext",
    "current_observer",
    "disable_hash_mode",
    "enable_hash_mode",
    "marking_non_deterministic",
    "observe",
    "observe_grad",
    "observe_non_deterministic",
    "observe_non_deterministic_grad",
    "read_recording",
]

_current: ContextVar[Observer | None] = ContextVar("hashbench_observer", default=None)
_KEY = "hashbench_observer"


class ObserverContext:
    """Everything between entering and leaving is one run, observed; its observations go to ``<dump_dir>/<name>.json``.

    With a reference they are compared with that of the earlier run, and mismatches are logged as a table on leaving.
    Where the region ends with an exception, what was observed goes to ``<name>.incomplete.json``, which is no
    reference, and an earlier file stays. Of nested contexts the functions of this module speak to the innermost one.

    Args:
        dump_dir: the folder; made where it does not exist.
        name: of the run, and of its files.
        reference_hash_file: the JSON file of the run to compare with.
        raise_on_mismatch: raise at the first mismatch, where it happens, and on leaving, where there is any.

    Raises:
        HashbenchError: the reference is missing, damaged, of another version, of a run that ended with an error, or
            empty; it would be overwritten by this run; or a file cannot have the name.
        MismatchError: with ``raise_on_mismatch``; a ``RuntimeError``.
    """

    def __init__(
        self,
        dump_dir: str | Path,
        name: str,
        reference_hash_file: str | Path | None = None,
        raise_on_mismatch: bool = False,
    ) -> None:
        self._path = files.path_of(dump_dir, name)
        self._name, self._reference, self._raise = name, reference_hash_file, raise_on_mismatch
        self._entered: tuple[Observer, Token[Observer | None], Observer | None] | None = None

    def __enter__(self) -> Observer:
        if self._entered is not None:
            raise HashbenchError(
                "cannot enter an ObserverContext twice",
                consequence="its observations would be overwritten",
                tip="Make a new one, of another name.",
            )
        if self._reference is not None and self._path.resolve() == Path(self._reference).resolve():
            raise HashbenchError(
                f"cannot check against {self._path}",
                consequence="this run would be written over its own reference",
                tip="Give the check another name or dump_dir.",
            )
        observer = Observer(self._name, self._reference, self._raise)
        self._entered = observer, _current.set(observer), _stashed()
        _stash(observer)
        return observer

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        assert self._entered is not None
        observer, token, outer = self._entered
        _current.reset(token)
        _stash(outer)
        failure: HashbenchError | None = None
        try:
            observer.cleanup()
        except HashbenchError as raised:
            failure = raised
        recording = observer.finish(error or failure)
        if self._reference is not None:
            observer.report_mismatches()
        try:
            files.write(self._path, recording, observer.saved_tensors)
        except OSError as raised:
            failure = failure or HashbenchError(
                f"cannot write {self._path}",
                consequence=f"the observations of this run are lost ({raised.strerror or raised})",
                tip="Choose another dump_dir, or make room.",
            )
        if error is not None:
            return  # the region's own error is what is told
        if failure is not None:
            raise failure
        if observer.raise_on_mismatch and observer.mismatches:
            raise MismatchError(next(iter(observer.mismatches.values())))


def current_observer() -> Observer | None:
    """Return the observer of the innermost context; also in a thread of autograd's that runs the backward of a GPU."""
    observer = _current.get()
    return _stashed() if observer is None else observer


def _stashed() -> Observer | None:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


def _stash(observer: Observer | None) -> None:
    """Store the observer where torch hands it to the threads of a backward pass, which have no context variables.

    None stays under the key: torch 2.11 cannot remove one. It also takes a reference that it was not given.
    """
    before = sys.getrefcount(observer)
    torch._C._stash_obj_in_tls(_KEY, observer)
    if sys.getrefcount(observer) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(observer))


def observe(name: str, value: Any) -> None:
    """Record the digests of all tensors and plain values in ``value``; waits for the device. Without an observer
    nothing is done."""
    if (observer := current_observer()) is not None:
        observer.observe(name, value)


def observe_grad(name: str, tensor: torch.Tensor) -> None:
    """Record the digest of the gradient of ``tensor``, as ``<name>_grad``, whenever it is computed in this context."""
    if (observer := current_observer()) is not None:
        observer.observe_grad(name, tensor)


def observe_non_deterministic(name: str, tensor: Any) -> Any:
    """Mark a tensor (or a nesting of tensors) as nondeterministic: saved in a reference run, put back in a check.
    Returns it; see :meth:`Observer.observe_non_deterministic`."""
    observer = current_observer()
    return tensor if observer is None else observer.observe_non_deterministic(name, tensor)


def observe_non_deterministic_grad(name: str, tensor: torch.Tensor) -> str:
    """Mark the gradient of ``tensor``. Returns the name that it goes by."""
    observer = current_observer()
    return f"{name}_grad" if observer is None else observer.observe_non_deterministic_grad(name, tensor)


@contextlib.contextmanager
def marking_non_deterministic() -> Iterator[None]:
    """Mark every op in a region under the hash mode is nondeterministic; see
    :meth:`Observer.marking_non_deterministic`."""
    observer = current_observer()
    with contextlib.nullcontext() if observer is None else observer.marking_non_deterministic():
        yield


def enable_hash_mode() -> None:
    """Observe every op from now on; ``with observer.hash_mode:`` does so for a block."""
    if (observer := current_observer()) is not None:
        observer.enable_mode()
    else:
        log.warning("no ObserverContext is entered here: the hash mode stays off")


def disable_hash_mode() -> None:
    """Observe ops no longer."""
    if (observer := current_observer()) is not None:
        observer.disable_mode()
    else:
        log.warning("no ObserverContext is entered here: there is no hash mode to disable")
