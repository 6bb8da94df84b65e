"""A stand-in for a compiler, and what a build returns."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.native.build import Built, Unavailable

COMPILER = """#!/bin/sh
echo $$ >> {log}
case "$TMPDIR" in */.build-*) ;; *) echo "TMPDIR=$TMPDIR" >&2; exit 9;; esac  # what is killed leaves files there
while [ "$1" != -o ]; do
    case "$1" in *.cpp) source=$1;; esac
    shift
done
{body}
"""


COPIES = 'cp "$source" "$2"'


class FakeCompiler:
    """A program in place of a compiler, which ``$CXX`` names; its libraries are copies of their source."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "fake c++"
        self._log = folder / "calls"
        self.does(COPIES)

    def does(self, body: str) -> None:
        self.program.write_text(COMPILER.format(log=self._log, body=body))
        self.program.chmod(0o755)

    @property
    def started(self) -> list[int]:
        return list(map(int, self._log.read_text().split())) if self._log.exists() else []


def built(found: Built | Unavailable) -> Path:
    assert isinstance(found, Built), found
    return found.path


def reason(found: Built | Unavailable) -> str:
    assert isinstance(found, Unavailable), found
    assert "\n" not in found.reason
    assert found.reason == f"{found.what}; {found.advice}"
    return found.reason
