"""Write and read JSON with a checksum, so that what was truncated, changed or mixed from two files is refused.

A file has one of three layouts:

- a *document*: an object with the SHA-256 of the rest of it as ``sha256``. It may name files beside it by theirs.
- *lines*: a header, whose ``sha256`` is of all lines, and entries, written at once.
- *appended* lines, each with its own ``checksum``: a program that is killed leaves whole lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, parse_json, read_json, read_text, refuse_deep, sha256_of, to_json
from hashbench.core.text import one_line, shorten

_Entry = TypeVar("_Entry")

_compact = json.JSONEncoder(separators=(",", ":")).encode
_MARK, _CHANGED = ',"checksum":"', "{} was changed: its checksum differs"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A kind of sealed file.

    Attributes:
        schema: its version; another one is refused.
        what: it holds, as ``fingerprints``.
        consequence: of a file that cannot be used; ``{}`` stands for the reason.
        tip: what to do about it; ``{}`` stands for its path.
    """

    schema: int
    what: str
    consequence: str = "{}"
    tip: str = ""

    # ----------------------------------------------------------------------------------------------- a document

    def document(self, content: Mapping[str, Any]) -> str:
        """Return the text of a document; ``content`` has its schema."""
        return json.dumps(seal(content), indent=1)

    def read_document(self, path: Path, *, where: str = "it") -> dict[str, Any]:
        """Read a document.

        Raises:
            OSError: as for :func:`hashbench.core.io.read_file`.
            ValueError: it is truncated, changed, or no such document; the message begins with ``where``.
        """
        content = self.read_object(path, where=where)
        if content.get("sha256") != seal(content)["sha256"]:
            raise ValueError(_CHANGED.format(where))
        return content

    def read_object(self, path: Path, *, where: str = "it") -> dict[str, Any]:
        """Read a JSON object of this schema without a checksum of its own; raises as :meth:`read_document`."""
        try:
            content: dict[str, Any] = read_json(path)
        except ValueError:
            raise ValueError(f"{where} is truncated or not JSON") from None
        self.refuse_other_schema(content, where)
        return content

    def refuse_other_file(self, path: Path, sha256: str) -> None:
        """Raise ``ValueError`` unless the file beside a document has the digest that the document names."""
        try:
            same = sha256_of(path) == sha256
        except OSError as error:
            raise ValueError(f"{path.name}: {error.strerror}") from None
        if not same:
            raise ValueError(f"{path.name} is truncated, changed, or of another {self.what}")

    def refuse_other_schema(self, content: Any, where: str = "it") -> None:
        """Raise ``ValueError`` unless parsed JSON is an object of this schema."""
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError(f"{where} holds no {self.what}")
        refuse_deep(content, where)
        if type(content["schema"]) is not int or content["schema"] != self.schema:
            raise ValueError(
                f"{where} has schema version {content['schema']!a:.60}, this hashbench reads {self.schema}"
            )

    # ------------------------------------------------------------------------------- lines, written at once

    def lines(self, header: Mapping[str, Any], entries: Iterable[object]) -> str:
        """Return the text of a file of a header and entries."""
        lines = [_compact(to_json(entry)) for entry in entries]
        header = {"schema": self.schema, **header}
        sha256 = seal({**header, "lines": lines})["sha256"]
        return "\n".join([_compact({**header, "sha256": sha256}), *lines, ""])

    def read_lines(
        self, path: Path, kind: type[_Entry], *, most: int, longest: int = 0
    ) -> tuple[dict[str, Any], tuple[_Entry, ...]]:
        """Read the header, parsed, and the entries, of a file that may be gzip-compressed.

        Args:
            path: of the file.
            kind: dataclass of an entry.
            most: bytes of text.
            longest: maximum number of characters of an entry; 0: any.

        Raises:
            OSError: as for :func:`hashbench.core.io.read_text`.
            ValueError: it is truncated, changed, no such file, or an entry is none.
        """
        text = read_text(path, most=most)
        if not text.endswith("\n"):
            raise ValueError("it is truncated: its last line has no end")
        first, *lines = text[:-1].split("\n")
        if longest and max(map(len, lines), default=0) > longest:
            raise ValueError(f"a line has more than {longest // 2**20} MiB")
        header = _parsed(first, 1)
        self.refuse_other_schema(header)
        if header.get("sha256") != seal({**header, "lines": lines})["sha256"]:
            raise ValueError(_CHANGED.format("it"))
        entries = (from_json(kind, _parsed(line, at), where=f"line {at}") for at, line in enumerate(lines, 2))
        return header, tuple(entries)

    # --------------------------------------------------------------------------------------- appended lines

    def line(self, content: Mapping[str, Any]) -> str:
        """Return a line that ends with its checksum: 16 hexadecimal digits of the SHA-256 of its text before it."""
        body = _compact(content)[:-1]
        return f'{body}{_MARK}{_line_checksum(body)}"}}\n'

    def appended(self, text: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the appended lines of a text, parsed, and whether the last one is cut, which is left out.

        Raises:
            ValueError: a line was changed, or has no checksum.
        """
        *lines, rest = text.split("\n")
        return [_appended(line, number) for number, line in enumerate(lines, start=1)], bool(rest)

    # -------------------------------------------------------------------------------------------- its errors

    @contextlib.contextmanager
    def refusing(self, path: Path) -> Iterator[None]:
        """Turn what reading ``path`` raises into a :class:`HashbenchError` in one line."""
        try:
            yield
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or shorten(one_line(str(error)), 300)
            what, consequence = f"cannot use the {self.what} in {path}", self.consequence.format(reason)
            raise HashbenchError(what, consequence=consequence, tip=self.tip.format(path)) from error


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON document with the SHA-256 of the rest of it as ``sha256``, independent of key order."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _parsed(line: str, number: int) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error})") from None


def _appended(line: str, number: int) -> dict[str, Any]:
    body, mark, tail = line.rpartition(_MARK)
    if not mark or tail != f'{_line_checksum(body)}"}}':
        raise ValueError(f"line {number} was changed, or is no line with a checksum")
    content: dict[str, Any] = _parsed(line, number)
    refuse_deep(content, f"line {number}")
    return content


def _line_checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
