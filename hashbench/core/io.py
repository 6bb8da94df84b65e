"""Write files atomically, digest them, and convert dataclasses to and from JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import gzip
import hashlib
import itertools
import json
import os
import secrets
import select
import stat
import sys
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hashbench.core.errors import HashbenchError

_Value = TypeVar("_Value")

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
"""The folder that holds this package; added to the path of a Python started with ``-P``."""

LARGEST_FILE = 512 * 2**20
"""Maximum bytes of a file read into memory: a trace of a large model has some ten MiB."""

PIPE_SECONDS = 60.0
"""Time limit for the reader of a pipe."""

DEEPEST = 50
"""Limit on the levels of lists and objects in a part of a document that no type describes."""

_PIECE = 2**13
"""Bytes of gzip data that are decompressed at once."""

GZIP = b"\x1f\x8b"
"""First bytes of gzip data."""

UNREADABLE = ".unreadable"
"""Suffix of a file that could not be read; see :func:`set_aside`."""


class UnknownContentError(ValueError):
    """A well-formed document has a field or word that this version does not know: another version wrote it."""


class NotRegularError(OSError):
    """The path is a named pipe, socket or device; opening it may block forever."""


def shipped_folder(name: str, pattern: str) -> Path:
    """Return the folder ``name`` shipped with hashbench that has files matching ``pattern``.

    It is inside the package of an installed wheel, and beside the package in a checkout.

    Raises:
        HashbenchError: there is none.
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
    """Open the regular file ``path`` with ``flags`` of :func:`os.open`, without blocking; return the descriptor.

    Raises:
        NotRegularError: it is a named pipe, a socket or a device.
        IsADirectoryError: it is a folder.
        OSError: as for :func:`os.open`.
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
    """Read a regular file, or ``/dev/stdin`` or ``/dev/fd/…`` (a shell's ``<(command)``).

    Raises:
        NotRegularError: it is none.
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    passed = str(path).startswith(("/dev/fd/", "/dev/stdin"))
    with open(path, "rb") if passed else os.fdopen(open_file(path), "rb") as file:  # noqa: PTH123 – or a text
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"{Path(path).name} has more than {most // 2**20} MiB", str(path))
        return file.read()


def read_text(path: str | Path, *, most: int = LARGEST_FILE, members: bool = False, cut: bool = False) -> str:
    """Read a text file in UTF-8, gzip-compressed or not, of at most ``most`` bytes of text.

    Args:
        path: of the file.
        most: maximum number of bytes of text.
        members: accept gzip data of several members, one after the other.
        cut: return what comes before the first fault of a file that is truncated or damaged: whole members of gzip
            data, whole characters of text.

    Raises:
        OSError: as for :func:`read_file`.
        ValueError: it is truncated or damaged, no text, or expands to more.
    """
    content = read_file(path, most=most)
    if content.startswith(GZIP):
        content = _decompressed(content, most, Path(path).name, members=members, cut=cut)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut:
            return content[: error.start].decode("utf-8")
        raise ValueError("it is not a text file") from None


def _decompressed(content: bytes, most: int, name: str, *, members: bool, cut: bool) -> bytes:
    found: list[bytes] = []
    at, left = 0, most
    while at < len(content):
        if at and not members:
            raise ValueError("it is damaged (data follow the end of the gzip data)")
        try:
            text, at = _member(content, at, left)
        except OverflowError:
            raise ValueError(f"{name} has more than {most / 2**20:.4g} MiB of text") from None
        except ValueError:
            if cut:
                break
            raise
        found.append(text)
        left -= len(text)
    return b"".join(found)


def _member(content: bytes, at: int, most: int) -> tuple[bytes, int]:
    """Return the text of the gzip member that begins at ``at``, and where it ends; raise ``OverflowError`` if it has
    more than ``most`` bytes."""
    decoder = zlib.decompressobj(wbits=31)  # gzip with its checksum
    found: list[bytes] = []
    view = memoryview(content)
    while not decoder.eof and at < len(content):
        piece = view[at : at + _PIECE]  # what follows a member is copied
        try:
            found.append(decoder.decompress(piece, most + 1))
        except zlib.error as error:
            raise ValueError(f"it is damaged ({error})") from error
        most -= len(found[-1])
        if most < 0:
            raise OverflowError
        at += len(piece) - len(decoder.unused_data)
    if not decoder.eof:
        raise ValueError("it is truncated (the gzip data have no end)")
    return b"".join(found), at


def bytes_for(path: Path, text: str) -> bytes:
    """Encode ``text`` as the content of ``path``: gzip-compressed if its name ends in ``.gz``."""
    content = text.encode()
    return gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: as for :func:`read_file`.
        ValueError: it is not JSON in UTF-8, or is nested too deep.
    """
    return parse_json(read_file(path).decode("utf-8"))


def parse_json(text: str) -> Any:
    """Parse untrusted JSON; raise ``ValueError`` if it is none, or is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse_special(at: str | Path | int, *, name: str | Path | None = None) -> None:
    """Raise ``OSError`` unless the path or descriptor is a regular file, or does not exist."""
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


def replace_file(path: Path, text: str, *, links: bool = True) -> None:
    """Replace the content of ``path`` by ``text`` (UTF-8) atomically. A symbolic link stays one; without ``links`` it
    is refused.

    Raises:
        OSError: :class:`NotRegularError` included; ``path`` is unchanged and the temporary file removed.
    """
    replace_bytes(path, text.encode(), links=links)


def replace_bytes(path: Path, content: bytes, *, links: bool = True) -> None:
    """Replace the content of ``path`` by bytes; see :func:`replace_file`."""
    _refuse_special(path)  # as root a rename onto /dev/null replaces it for the whole machine
    if not links and path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
    path = Path(os.path.realpath(path)) if links else path
    # Nobody can have put a link there: its name cannot be known before, and what exists is not opened.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def hold_lock(path: Path) -> int:
    """Create a file and lock it for this process; return the descriptor, which holds the lock until it is closed.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened or locked.
    """
    lock = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def first_link(paths: Iterable[Path]) -> Path | None:
    """Return a symbolic link among ``paths`` or in a folder of them, through which a writer would get elsewhere;
    ``None`` if there is none.

    Raises:
        OSError: a folder cannot be read.
    """
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path.is_symlink():
            return path
        if path.is_dir():
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                waiting += (Path(each.path) for each in entries if each.is_symlink() or each.is_dir())
    return None


def set_aside(path: Path) -> Path:
    """Rename an unreadable file to ``NAME.unreadable`` (``NAME.unreadable.2`` if that exists, …); return its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    names = (f"{path.name}{UNREADABLE}{f'.{number}' if number > 1 else ''}" for number in itertools.count(1))
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(target)
    return target


def write_file(path: Path, text: str | bytes, *, tip: str) -> None:
    """Write an output file that the user requested.

    Like :func:`replace_file`, but creates the folder, replaces lone surrogates by ``?``, and also writes to special
    files (``/dev/stdout``, a named pipe).

    Raises:
        HashbenchError: it cannot be written, or a pipe has no reader within :data:`PIPE_SECONDS`.
    """
    content = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_bytes(path, content)
        except NotRegularError:
            _write_through(path, content)
    except OSError as error:
        raise HashbenchError(f"cannot write {path}", consequence=error.strerror or str(error), tip=tip) from error


def refuse_unwritable(path: Path, *, folder: bool = False) -> None:
    """Refuse a file that could not be written, or with ``folder`` a folder that could not be made or filled, as far as
    that shows without touching anything: for before work that takes long.

    Raises:
        OSError: as writing it would.
    """
    path = path.absolute()
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe or a device takes what it takes
        return
    if not folder and path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    there = next(each for each in (path, *path.parents) if os.path.lexists(each) and (folder or each != path))
    if not there.is_dir():
        number = errno.EEXIST if there == path else errno.ENOTDIR
        raise OSError(number, os.strerror(number))
    if not os.access(there, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number))


def tell_unwritten(path: str | Path, error: OSError, consequence: str) -> None:
    """Say on standard error that a file of a program which goes on cannot be written; nothing where that lies on the
    same disk, or is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hashbench: cannot write {path}: {error.strerror or error}; {consequence}", file=sys.stderr)


def _write_through(path: Path, content: bytes) -> None:
    """Write to a special file as long as it is read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise OSError(error.errno, "nobody reads from it" if error.errno == errno.ENXIO else error.strerror) from error
    try:
        write_within(descriptor, content, seconds=PIPE_SECONDS)
    finally:
        os.close(descriptor)


def write_within(descriptor: int, content: bytes, *, seconds: float) -> None:
    """Write to a non-blocking pipe; raise ``OSError`` if nothing is read for so many seconds."""
    while content:
        if not select.select([], [descriptor], [], seconds)[1]:
            raise OSError(errno.ETIMEDOUT, f"nobody has read from it for {seconds:g} s")
        content = content[os.write(descriptor, content) :]


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; empty if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError:
        return ""


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; raise ``OSError`` if it cannot be read."""
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a power cut cannot undo a rename (POSIX; Windows cannot open a folder)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------- JSON and dataclasses


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``; raise :class:`HashbenchError` if there is none."""
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
    """Convert ``value`` for :func:`json.dumps`: dataclasses and mappings to dicts, tuples to lists."""
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
    """Convert ``document``, parsed from untrusted JSON, to a frozen dataclass. Missing fields get their default.

    Fields may be dataclasses, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str, X]``, ``X | None``, ``object``, or
    plain types; an integer is accepted as ``float``.

    Raises:
        UnknownContentError: it has a field that the dataclass lacks.
        ValueError: a field without a default is missing, has another type, or is nested deeper than :data:`DEEPEST`.
            Both messages are one line that begins with ``where``.
    """
    return _decoded(kind, document, where or getattr(kind, "__name__", "it"))


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object or kind is Any:
        refuse_deep(value, where)
        return value
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _decoded(inner, value, where)
    if origin is tuple:
        items = _of_type(list, value, where)
        if arguments[-1] is Ellipsis and arguments[0] in _PLAIN and set(map(type, items)) <= {arguments[0]}:
            return tuple(items)  # as below, but many words take a tenth of the time
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


_PLAIN = (bool, int, str)


def refuse_deep(value: Any, where: str, levels: int = DEEPEST) -> None:
    """Raise ``ValueError`` if parsed JSON is nested deeper than :data:`DEEPEST`."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, (dict, list)):
            if levels <= 1:
                raise ValueError(f"{where} is nested deeper than {DEEPEST} levels")
            refuse_deep(item, where, levels - 1)


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
