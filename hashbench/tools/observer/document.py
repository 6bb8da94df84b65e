"""JSON serialisation of a recording, validated when read. Pure: text in, text out.

The document ends with its own SHA-256, and names that of the tensors' file beside it (``tensors``), so that what was
cut, changed, or put together from two runs is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Never

from hashbench.io import document_digest
from hashbench.records import OpRecord
from hashbench.tools.observer.recording import Observation, Recording, Saved
from hashbench.trace.file import digest_text, parse_digest

SCHEMA = 1
"""Version of the document; another one is refused."""

KIND = "hashbench-observations"

_LARGEST = 2**62
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("id", "phase", "module", "op", "arguments", "scalar", "rng", "forward_op", "source")
"""The fields of a record that are kept, beside its iteration and outputs. What it read is not compared."""


class BadDocumentError(Exception):
    """Why a text is no recording that may be compared with."""


def dumps(recording: Recording, *, tensors: str) -> str:
    """The document. ``tensors`` is the SHA-256 of the tensors' file in hexadecimal digits; empty: there is none."""
    found = {
        "kind": KIND,
        "schema": SCHEMA,
        "name": recording.name,
        "checked": recording.checked,
        "put_back": recording.put_back,
        "error": recording.error,
        "tensors": tensors,
        "environment": recording.environment,
        "observations": [_encoded(one) for one in recording.observations],
    }
    return json.dumps({**found, "sha256": document_digest(found)}, indent=1) + "\n"


def _encoded(one: Observation) -> dict[str, Any]:
    record = one.record
    found: dict[str, Any] = {"name": one.name, "iteration": record.iteration}
    found |= {name: getattr(record, name) for name in _TEXTS if getattr(record, name)}
    found["outputs"] = [digest_text(output) for output in record.outputs]
    if one.saved:
        found["saved"] = [[saved.number, saved.dtype, list(saved.shape), saved.device] for saved in one.saved]
    return found | ({"note": one.note} if one.note else {})


# -------------------------------------------------------------------------------------------------------- reading


def loads(text: bytes) -> tuple[Recording, str]:
    """The recording in a document, and the SHA-256 of its tensors' file (empty: it has none).

    Raises:
        BadDocumentError: it is no document of this version, is not whole, or holds what cannot be.
    """
    found = _document(text)
    if found.get("kind") != KIND:
        bad("it holds no observations of hashbench")
    if type(found.get("schema")) is not int or found["schema"] != SCHEMA:
        bad(f"it has schema version {_short(found.get('schema'))}, this hashbench reads {SCHEMA}")
    if found.get("sha256") != document_digest(found):
        bad("it was changed or damaged (its checksum is another)")
    tensors = _text(found, "tensors")
    if tensors and not _SHA256.fullmatch(tensors):
        bad("its tensors have no checksum")
    environment = found.get("environment")
    if not isinstance(environment, dict) or not _shallow(environment, 6):
        bad("its environment is no mapping of values")
    observations = tuple(map(_observation, _list(found, "observations")))
    _check(observations, tensors)
    recording = Recording(
        _text(found, "name"),
        observations,
        environment,
        checked=_field(found, "checked", bool),
        put_back=_number(found, "put_back"),
        error=_text(found, "error"),
    )
    return recording, tensors


def _document(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
        json.dumps(found, sort_keys=True)  # one level less of nesting than reading takes may be too many for writing
    except (ValueError, RecursionError):
        return bad("it is truncated or no JSON")
    return found if isinstance(found, dict) else bad("it is no JSON object")


def _observation(entry: Any) -> Observation:
    if not isinstance(entry, dict):
        return bad("an observation is no mapping")
    iteration = _number(entry, "iteration")
    texts: dict[str, Any] = {name: _text(entry, name) if name in entry else "" for name in _TEXTS}
    try:
        outputs = tuple(map(parse_digest, _list(entry, "outputs")))
    except (ValueError, TypeError):
        return bad("an observation holds what is no digest")
    record = OpRecord(iteration=iteration, outputs=outputs, **texts)
    saved = tuple(map(_saved, _list(entry, "saved"))) if "saved" in entry else ()
    return Observation(_text(entry, "name"), record, saved, _text(entry, "note") if "note" in entry else "")


def _saved(entry: Any) -> Saved:
    match entry:
        case [int(number), str(dtype), list(shape), str(device)] if type(number) is int:
            if 0 <= number < _LARGEST and all(type(size) is int and 0 <= size < _LARGEST for size in shape):
                return Saved(number, dtype, tuple(shape), device)
    return bad("a saved tensor has no number, dtype, shape and device")


def _check(observations: tuple[Observation, ...], tensors: str) -> None:
    for names in ([one.name for one in observations], [one.record.id for one in observations]):
        if len(set(names)) != len(names):
            bad("two observations have one name")
    numbers = [saved.number for one in observations for saved in one.saved]
    if sorted(numbers) != list(range(len(numbers))) or bool(numbers) != bool(tensors):
        bad("its tensors are not those of its file of tensors")


def _shallow(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(item, levels - 1) for item in inner)


def _number(found: Mapping[str, Any], name: str) -> int:
    value: int = _field(found, name, int)
    return value if 0 <= value < _LARGEST else bad(f"{name!r} is too large")


def _text(found: Mapping[str, Any], name: str) -> str:
    value: str = _field(found, name, str)
    return value


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value: list[Any] = _field(found, name, list)
    return value


def _field(found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = found.get(name)
    return value if type(value) is kind else bad(f"{name!r} is no {kind.__name__}")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def bad(what: str) -> Never:
    """Refuse, for this reason."""
    raise BadDocumentError(what)
