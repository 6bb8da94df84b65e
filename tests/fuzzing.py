"""Files as a broken disk or a hostile sender would leave them: seeded, so that a failure comes again.

``damaged`` knows nothing of what a file holds; ``altered`` changes the values of a JSON document, one at a time, for
readers whose checksum a sender would have computed again.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hashbench.core.errors import HashbenchError
from hashbench.core.sealed import seal

_Read = TypeVar("_Read")

HUGE = 10**400
"""A whole number that fits nowhere; as JSON it is still a short text."""

DEEP = 100_000
"""So many brackets within each other are more than Python's recursion allows."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**63, HUGE, 1.5, float("nan"), float("inf")),
    *("", "\x00", "../../outside", "/etc/passwd", "x" * 10_000, "float32[99999999999,99999999999]:00", "é\ud800"),
    *([], {}, [[]], [None], {"": None}, {"schema": 1}, [0] * 1000),
)
"""What may stand where a document has something else. The last letter of one text is half a surrogate pair."""


def damaged(content: bytes, *, seed: int = 0, flips: int = 60, cuts: int = 40) -> Iterator[tuple[str, bytes]]:
    """``content`` truncated, with single bits flipped, with parts doubled, dropped and zeroed, and replaced by what is
    something else; each with a name for it. Every one differs from ``content``."""
    rng = random.Random(seed)
    for length in sorted({0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(cuts))}):
        yield f"cut after {length} bytes", content[:length]
    for _ in range(flips):
        place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        yield f"bit {bit} of byte {place} flipped", _with(content, place, bytes([content[place] ^ bit]))
    for _ in range(8):
        start, end = sorted(rng.sample(range(len(content) + 1), 2))
        yield f"bytes {start} to {end} twice", content[:end] + content[start:]
        yield f"bytes {start} to {end} dropped", content[:start] + content[end:]
        if any(content[start:end]):
            yield f"bytes {start} to {end} zeroed", _with(content, start, bytes(end - start))
    yield from foreign()


def every_damage(content: bytes, *, bits: Iterable[int] = (0, 5)) -> Iterator[tuple[str, bytes]]:
    """``content`` cut at every place, and with each of its bytes changed in each of these bits."""
    for place, byte in enumerate(content):
        yield f"cut after {place} bytes", content[:place]
        for bit in bits:
            yield f"bit {bit} of byte {place} flipped", _with(content, place, bytes([byte ^ 1 << bit]))


def readings(
    path: Path, contents: Iterable[tuple[str, bytes]], read: Callable[[Path], _Read]
) -> Iterator[tuple[str, _Read | None]]:
    """Yield what is read of a file with each of the contents: ``None`` where it is refused, which takes one line."""
    for name, content in contents:
        path.write_bytes(content)
        found, said = None, ""
        try:
            found = read(path)
        except HashbenchError as error:
            said = str(error)
        assert "\n" not in said, name
        assert len(said) < 1000, name
        yield name, found


def forged(document: list[Any]) -> bytes:
    """A header and other lines as the text of a sealed file, whose checksum fits."""
    header, *entries = document
    lines = list(map(json.dumps, entries))
    sha256 = seal({**header, "lines": lines})["sha256"]
    return "\n".join([json.dumps({**header, "sha256": sha256}), *lines, ""]).encode()


def altered_lines(document: list[Any], *, most: int) -> Iterator[tuple[str, bytes]]:
    """Sealed files with one value each that is an odd one, gone or there twice, whose checksum fits."""
    for name, changed in altered(document, most=most):
        if changed and isinstance(changed[0], dict):
            yield name, forged(changed)


def foreign() -> Iterator[tuple[str, bytes]]:
    """Contents that are something else altogether, among them JSON that is nested too deep or holds huge numbers."""
    yield "brackets without end", b"[" * DEEP
    yield "nested lists", b"[" * DEEP + b"]" * DEEP
    yield "nested objects", b'{"schema":' * DEEP + b"1" + b"}" * DEEP
    yield "a number of many digits", b'{"schema": ' + b"9" * 20_000 + b"}"
    yield "another document", b'{"schema": 1}'
    yield "a list", b"[1, 2, 3]"
    yield "a text", b'"text"'
    yield "not a number", b"NaN"
    yield "not UTF-8", b"\xff\xfe{\x00}\x00"
    yield "a pickle", b"\x80\x04cbuiltins\nprint\n(S'unpickled'\ntR."
    yield "zeros", bytes(4096)


def _with(content: bytes, start: int, part: bytes) -> bytes:
    return content[:start] + part + content[start + len(part) :]


def altered(document: Any, *, seed: int = 0, most: int = 400) -> Iterator[tuple[str, Any]]:
    """Copies of a JSON document with one value each replaced by an odd one, or removed, or put there twice; at most
    so many of them, drawn from all places. Each differs from the document (as JSON)."""
    rng = random.Random(seed)
    changes = [(path, number) for path in _places(document) for number in range(len(ODD_VALUES) + 2)]
    for path, number in rng.sample(changes, min(most, len(changes))):
        changed = copy.deepcopy(document)
        name = _change(changed, path, number)
        if json.dumps(changed) != json.dumps(document):
            yield f"{'.'.join(map(str, path))} {name}", changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _change(document: Any, path: tuple[Any, ...], number: int) -> str:
    *outer, key = path
    holder = document
    for step in outer:
        holder = holder[step]
    if number < len(ODD_VALUES):
        holder[key] = ODD_VALUES[number]
        return f"is {ODD_VALUES[number]!r:.40}"
    if number == len(ODD_VALUES):
        del holder[key]
        return "is gone"
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}_"] = copy.deepcopy(holder[key])
    return "is there twice"
