"""Files: written so that a crash leaves the old content or the new one, digests, and JSON to and from dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hashbench.errors import HashbenchError

_Value = TypeVar("_Value")

PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
"""The folder that holds this package: what a Python started with ``-P`` puts on its path to find it."""


def replace_file(path: Path, text: str) -> None:
    """Give ``path`` the content ``text`` (UTF-8) in one step that survives a crash. A link stays one, and so does what
    is not a file (``/dev/null``, a pipe), which is simply written to. Raises ``OSError``; ``path`` is then as it was
    and the temporary file is gone."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """:func:`replace_file` for bytes."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
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


def write_file(path: Path, text: str, *, tip: str) -> None:
    """:func:`replace_file` for what a user asked for: the folder is made, and lone surrogates become ``?``.

    Raises:
        HashbenchError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise HashbenchError(f"cannot write {path}", consequence=error.strerror or str(error), tip=tip) from error


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file in hexadecimal digits; empty where there is none that can be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
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
    """``document``, parsed from untrusted JSON, as a frozen dataclass with exactly these fields.

    Fields may be dataclasses, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str, X]``, ``X | None``, ``object``, or
    plain types; a whole number may stand for a ``float``.

    Raises:
        ValueError: a field is missing, unknown, or of another type; in one line, which begins with ``where``.
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
    return float(value) if kind is float and type(value) is int else _of_type(kind, value, where)


def _decoded_dataclass(kind: Any, value: Any, where: str) -> Any:
    hints = _hints(kind)
    if _of_type(dict, value, where).keys() != hints.keys():
        names = sorted(str(name)[:40] for name in value.keys() ^ hints.keys())
        raise ValueError(f"{where} has other fields: {', '.join(names[:8])}")
    return kind(**{name: _decoded(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _of_type(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} is {str(value)[:40]!r}, which is not {kind.__name__}")
    return value
