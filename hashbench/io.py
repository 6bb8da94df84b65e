"""Files: written so that a crash leaves the old content or the new one, digests, and JSON to and from dataclasses."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import select
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hashbench.errors import HashbenchError

_Value = TypeVar("_Value")

PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
"""The folder that holds this package: what a Python started with ``-P`` puts on its path to find it."""

LARGEST_FILE = 512 * 2**20
"""Bytes of a file that is still read into memory: a trace of a large model has some ten MiB."""

PIPE_SECONDS = 60.0
"""How long what a user asked for waits for the reader of a pipe."""


UNREADABLE = ".unreadable"
"""Appended to the name of a file that could not be read; see :func:`set_aside`."""


class UnknownContentError(ValueError):
    """A document is well-formed, and has a field or a word that this version does not know: another one wrote it."""


class NotRegularError(OSError):
    """What lies at a path is no regular file but a named pipe, a socket or a device: to open it may wait for ever."""


def shipped_folder(name: str, pattern: str) -> Path:
    """The folder ``name`` that is shipped with hashbench, in which something matches ``pattern``: inside the package of
    an installed wheel, else beside the package in a checkout.

    Raises:
        HashbenchError: neither is there.
    """
    for folder in (Path(PACKAGE_PARENT, "hashbench", name), Path(PACKAGE_PARENT, name)):
        if any(folder.glob(pattern)):
            return folder
    raise HashbenchError(
        f"cannot find hashbench's {name} folder",
        consequence="what is shipped there cannot be read",
        tip="Install hashbench again, or run it from a whole checkout.",
    )


def open_file(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file ``path``, opened with ``flags`` of :func:`os.open`; it never waits.

    Raises:
        NotRegularError: there is a named pipe, a socket or a device.
        IsADirectoryError: there is a folder.
        OSError: as :func:`os.open` does.
    """
    _refuse_special(path)  # to open a device may already do something
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _refuse_special(descriptor, name=path)  # another may have come in between
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def read_file(path: str | Path, *, most: int = LARGEST_FILE) -> bytes:
    """The content of a regular file, or of what is called ``/dev/stdin`` or ``/dev/fd/…`` (a shell's ``<(command)``).
    Raises ``OSError``: :class:`NotRegularError` for what is none, and where it has more than ``most`` bytes."""
    passed = str(path).startswith(("/dev/fd/", "/dev/stdin"))
    with open(path, "rb") if passed else os.fdopen(open_file(path), "rb") as file:  # noqa: PTH123 – or a text
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"{Path(path).name} has more than {most // 2**20} MiB", str(path))
        return file.read()


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: as :func:`read_file`.
        ValueError: it is not JSON in UTF-8, or is nested too deep to be read.
    """
    content = read_file(path)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse_special(at: str | Path | int, *, name: str | Path | None = None) -> None:
    """Raise ``OSError`` unless there is a regular file, or nothing, ``at`` a path or behind a descriptor."""
    path = str(at if name is None else name)
    try:
        mode = os.stat(at).st_mode  # noqa: PTH116 – a descriptor, too
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise NotRegularError(errno.EINVAL, f"{Path(path).name} is {kind}, not a regular file", path)


def replace_file(path: Path, text: str) -> None:
    """Give ``path`` the content ``text`` (UTF-8) in one step that survives a crash. A link stays one. Raises
    ``OSError``, :class:`NotRegularError` included; ``path`` is then as it was and the temporary file is gone."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """:func:`replace_file` for bytes."""
    _refuse_special(path)  # as root a rename onto /dev/null replaces it for the whole machine
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def hold_lock(path: Path) -> int:
    """Create a file, and return a descriptor that locks it for this process alone until it is closed. The kernel gives
    the lock back when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened or locked.
    """
    lock = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be read to ``NAME.unreadable``, to ``NAME.unreadable.2`` where that exists, and so on.
    Return its new path. Raises ``OSError``."""
    names = (f"{path.name}{UNREADABLE}{f'.{number}' if number > 1 else ''}" for number in itertools.count(1))
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(target)
    return target


def write_file(path: Path, text: str, *, tip: str) -> None:
    """:func:`replace_file` for what a user asked for: the folder is made, lone surrogates become ``?``, and what is no
    file (``/dev/stdout``, a named pipe) is written to.

    Raises:
        HashbenchError: it cannot be written, or nobody reads the pipe, or not within :data:`PIPE_SECONDS`.
    """
    content = text.encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_bytes(path, content)
        except NotRegularError:
            _write_through(path, content)
    except OSError as error:
        raise HashbenchError(f"cannot write {path}", consequence=error.strerror or str(error), tip=tip) from error


def _write_through(path: Path, content: bytes) -> None:
    """Write to what is no file, as long as somebody takes it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise OSError(error.errno, "nobody reads from it" if error.errno == errno.ENXIO else error.strerror) from error
    try:
        write_within(descriptor, content, seconds=PIPE_SECONDS)
    finally:
        os.close(descriptor)


def write_within(descriptor: int, content: bytes, *, seconds: float) -> None:
    """Write to a pipe that does not block; raises ``OSError`` where nobody has read from it for so many seconds."""
    while content:
        if not select.select([], [descriptor], [], seconds)[1]:
            raise OSError(errno.ETIMEDOUT, f"nobody has read from it for {seconds:g} s")
        content = content[os.write(descriptor, content) :]


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file in hexadecimal digits; empty where there is none that can be read."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def document_digest(document: Mapping[str, Any]) -> str:
    """What a JSON document says of itself under ``sha256``: the SHA-256 of all else in it, whatever its order."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Without this a power cut may undo a rename (POSIX; Windows cannot open a folder)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------- JSON and dataclasses


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`HashbenchError` where there is none."""
    try:
        content = read_json(path)
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error)) from error
    except ValueError as error:
        raise HashbenchError(f"cannot read {path}", consequence=f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise HashbenchError(f"cannot read {path}", consequence="it holds no JSON object")
    return content


def to_json(value: Any) -> Any:
    """``value`` as what :func:`json.dumps` takes: dataclasses and mappings become dicts, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


@typing.overload
def from_json(kind: type[_Value], document: Any, *, where: str = ...) -> _Value: ...
@typing.overload
def from_json(kind: object, document: Any, *, where: str = ...) -> Any: ...
def from_json(kind: Any, document: Any, *, where: str = "") -> Any:
    """``document``, parsed from untrusted JSON, as a frozen dataclass. A field that it lacks has its default.

    Fields may be dataclasses, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str, X]``, ``X | None``, ``object``, or
    plain types; a whole number may stand for a ``float``.

    Raises:
        UnknownContentError: it has a field that the dataclass has not.
        ValueError: a field without a default is missing, or one is of another type. Both in one line, which begins with
            ``where``.
    """
    return _decoded(kind, document, where or getattr(kind, "__name__", "it"))


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object or kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _decoded(inner, value, where)
    if origin is tuple:
        items = _of_type(list, value, where)
        kinds = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(items):
            raise ValueError(f"{where} has {len(items)} items instead of {len(kinds)}")
        return tuple(
            _decoded(*pair, f"{where}[{number}]") for number, pair in enumerate(zip(kinds, items, strict=True))
        )
    if origin is not None:
        mapping = _of_type(dict, value, where)
        return {key: _decoded(arguments[1], item, f"{where}[{key!r:.40}]") for key, item in mapping.items()}
    if dataclasses.is_dataclass(kind):
        return _decoded_dataclass(kind, value, where)
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where} is a whole number of {value.bit_length()} bits, which is not a float") from None
    return _of_type(kind, value, where)


def _decoded_dataclass(kind: Any, value: Any, where: str) -> Any:
    hints, given = _hints(kind), _of_type(dict, value, where).keys()
    if missing := sorted(_required(kind) - given):
        raise ValueError(f"{where} lacks the fields {', '.join(missing[:8])}")
    if unknown := sorted(str(name)[:40] for name in given - hints.keys()):
        raise UnknownContentError(f"{where} has unknown fields: {', '.join(unknown[:8])}")
    known = [(name, hint) for name, hint in hints.items() if name in given]
    return kind(**{name: _decoded(hint, value[name], f"{where}.{name}") for name, hint in known})


@functools.cache
def _required(kind: Any) -> frozenset[str]:
    """Return the fields without a default."""
    missing = dataclasses.MISSING
    return frozenset(
        field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is missing
    )


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _of_type(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} is {str(value)[:40]!r}, which is not {kind.__name__}")
    return value
