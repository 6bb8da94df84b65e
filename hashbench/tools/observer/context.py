"""``ObserverContext``, and module-level functions that call the current observer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hashbench.errors import HashbenchError
from hashbench.tools.observer import files
from hashbench.tools.observer.observer import MismatchError, Observer

log = logging.getLogger(__name__)

_current: ContextVar[Observer | None] = ContextVar("hashbench_observer", default=None)


class ObserverContext:
    """Everything between entering and leaving is one run, observed; its observations go to ``<dump_dir>/<name>.json``.

    With a reference they are compared with that of the earlier run. On leaving, mismatches are logged as a table.
    Where the region ends with an exception, what was observed goes to ``<name>.incomplete.json``, which no check takes
    for a reference, and an earlier file stays. Contexts may be nested: functions of this module speak to the
    innermost one, and each observer's hash mode belongs to it alone; two cannot be on at once.

    Args:
        dump_dir: the folder; made where it is not there.
        name: of the run, and of its files.
        reference_hash_file: the JSON file of the run to compare with.
        raise_on_mismatch: raise at the first mismatch, where it happens, and on leaving, where there is any.

    Raises:
        HashbenchError: the reference is missing, damaged, of another version, of a run that ended with an error, or
            empty; it would be overwritten by this run; or the name is no name of a file.
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
        self._observer: Observer | None = None
        self._token: Token[Observer | None] | None = None

    def __enter__(self) -> Observer:
        if self._observer is not None:
            raise HashbenchError(
                "cannot enter an ObserverContext twice",
                consequence="its observations would be overwritten",
                tip="Make a new one, of another name.",
            )
        if self._reference is not None and _same_file(self._path, files.reference_path(self._reference)):
            raise HashbenchError(
                f"cannot check against {self._path}",
                consequence="this run would be written over its own reference",
                tip="Give the check another name or dump_dir.",
            )
        self._observer = Observer(self._name, self._reference, self._raise)
        self._token = _current.set(self._observer)
        return self._observer

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        observer, token = self._observer, self._token
        assert observer is not None
        assert token is not None
        _current.reset(token)
        ended = _cleaned_up(observer)
        recording = observer.finish(error or ended)
        if self._reference is not None:
            observer.report_mismatches()
        try:
            files.write(self._path, recording, observer.saved_tensors)
        except OSError as failure:
            ended = ended or _not_written(self._path, failure)
        if error is not None:
            return  # the region's own error is what is told
        if ended is not None:
            raise ended
        first = next(iter(observer.mismatches.values()), None)
        if observer.raise_on_mismatch and first is not None:
            raise MismatchError(first)


def _same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _cleaned_up(observer: Observer) -> HashbenchError | None:
    try:
        observer.cleanup()
    except HashbenchError as error:
        return error
    return None


def _not_written(path: Path, failure: OSError) -> HashbenchError:
    return HashbenchError(
        f"cannot write {path}",
        consequence=f"the observations of this run are lost ({failure.strerror or failure})",
        tip="Choose another dump_dir, or make room.",
    )


def current_observer() -> Observer | None:
    """The observer of the innermost context; also in a thread of autograd's that runs the backward of a GPU."""
    found = _current.get()
    if found is None and torch._C._is_key_in_tls("context"):
        # torch hands the context of whoever called backward() to its device threads under this key.
        found = torch._C._get_obj_in_tls("context").get(_current)
    return found


def observe(name: str, value: Any) -> None:
    """Record the digests of all tensors and plain values in ``value``; waits for the device. Without an observer
    nothing is done."""
    observer = current_observer()
    if observer is not None:
        observer.observe(name, value)


def observe_grad(name: str, tensor: torch.Tensor) -> None:
    """Record the digest of the gradient of ``tensor``, as ``<name>_grad``, whenever it is computed in this context."""
    observer = current_observer()
    if observer is not None:
        observer.observe_grad(name, tensor)


def observe_non_deterministic(name: str, tensor: Any) -> Any:
    """Mark a tensor (or a nesting of tensors) as nondeterministic: saved in a reference run, put back in a check.
    Returns it; see :meth:`Observer.observe_non_deterministic`."""
    observer = current_observer()
    return tensor if observer is None else observer.observe_non_deterministic(name, tensor)


def observe_non_deterministic_grad(name: str, tensor: torch.Tensor) -> str:
    """The same for the gradient of ``tensor``. Returns the name that it goes by."""
    observer = current_observer()
    return f"{name}_grad" if observer is None else observer.observe_non_deterministic_grad(name, tensor)


@contextmanager
def marking_non_deterministic() -> Iterator[None]:
    """A region in which every op under the hash mode is nondeterministic; see
    :meth:`Observer.marking_non_deterministic`."""
    observer = current_observer()
    if observer is None:
        yield
        return
    with observer.marking_non_deterministic():
        yield


def enable_hash_mode() -> None:
    """Observe every op from now on."""
    observer = current_observer()
    if observer is None:
        log.warning("there is no ObserverContext here: the hash mode stays off")
    else:
        observer.enable_mode()


def disable_hash_mode() -> None:
    """Observe ops no longer."""
    observer = current_observer()
    if observer is None:
        log.warning("there is no ObserverContext here: there is no hash mode to disable")
    else:
        observer.disable_mode()
