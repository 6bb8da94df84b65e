"""The kernels that a model's compilation made and ran, as data, and the file that holds them. Imports no torch.

The folder ``compiled_kernels/`` beside ``accuracy.csv`` has one file per model: lines of JSON, gzip-compressed, of at
most :data:`MOST_BYTES` bytes. The first line has the schema, the model and a SHA-256 of all lines, each other line one
call of a kernel. Two nights are compared by these files (:mod:`hashbench.extensions.compiled.report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hashbench.core.io import bytes_for, from_json, to_json, write_file
from hashbench.core.results.folder import file_key
from hashbench.core.sealed import Sealed

SCHEMA = 1
"""Version of the file; another version is refused."""

FOLDER = "compiled_kernels"
"""Folder within a results folder, with one file per model."""

MOST_BYTES = 100_000
"""Limit on the size of a file; of a longer program, the first kernels are kept."""

DIGITS = 12
"""Hexadecimal digits of a digest in a file: among 10,000 digests, two different ones agree with p = 2e-7."""

_MOST_TEXT = 2**25
_FILE = Sealed(SCHEMA, "compiled kernels", tip="Sweep the model again with --backend.")


@dataclass(frozen=True, slots=True)
class ListedKernel:
    """One call of a generated kernel, or of an op by a generated module.

    Attributes:
        name: of the kernel (``cpp_fused_relu_3``) or of the op (``extern_kernels.mm``).
        source: digest of its source (:func:`hashbench.extensions.compiled.sources.source_digest`); empty for an op.
        reads: digests of what it read, in the order of its arguments.
        writes: digests of what it wrote, likewise; empty if they were not recorded.
        ops: aten ops of the program that it computes.
        module: path of their module.
        phase: ``forward`` or ``backward``.
        graph: number of the compiled graph, from 0.
        launch: configuration of a Triton kernel (``XBLOCK 1024, 4 warps, 1 stage``); empty for anything else.
    """

    name: str
    source: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    module: str = ""
    phase: str = "forward"
    graph: int = 0
    launch: str = ""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The kernel calls of one compiled model.

    Attributes:
        suite: name of the suite.
        name: of the model.
        mode: of the sweep.
        device: of the kernels.
        dtype: of the sweep.
        backend: as ``torch.compile`` has it.
        kernels: the calls of one step, in order.
        left_out: number of later calls that are not among them, since the file would be too large.
    """

    suite: str
    name: str
    mode: str
    device: str
    dtype: str
    backend: str
    kernels: tuple[ListedKernel, ...] = field(default=(), repr=False)
    left_out: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the compiled model."""
        return self.suite, self.name, self.mode, self.device, self.dtype, self.backend


@dataclass(frozen=True, slots=True)
class _ProgramHeader:
    """The first line: a program with the number of its kernels."""

    schema: int
    program: Mapping[str, object]
    sha256: str


def path_in(folder: Path, *, suite: str, name: str, mode: str) -> Path:
    """Return the path of a model's file in a results folder."""
    return folder / FOLDER / f"{file_key(suite=suite, mode=mode, name=name)}.jsonl.gz"


def write(folder: Path, program: CompiledProgram) -> Path:
    """Write the file of a model into a results folder, with its first kernels if all would be too many.

    Raises:
        HashbenchError: it cannot be written.
    """
    path = path_in(folder, suite=program.suite, name=program.name, mode=program.mode)
    write_file(path, _largest(program, path), tip="Choose another --output.")
    return path


def _largest(program: CompiledProgram, path: Path) -> bytes:
    """Return the content of the file with as many kernels as fit."""
    kernels = tuple(map(_shortened, program.kernels))

    number = len(kernels)
    while True:
        left_out = program.left_out + len(kernels) - number
        content = bytes_for(path, text_of(replace(program, kernels=kernels[:number], left_out=left_out)))
        if len(content) <= MOST_BYTES or not number:
            return content
        number = int(0.99 * number * MOST_BYTES / len(content))


def _shortened(kernel: ListedKernel) -> ListedKernel:
    reads, writes = (tuple(digest[:DIGITS] for digest in digests) for digests in (kernel.reads, kernel.writes))
    return replace(kernel, source=kernel.source[:DIGITS], reads=reads, writes=writes)


def text_of(program: CompiledProgram) -> str:
    """Serialise to the text of the file."""
    described = {**to_json(replace(program, kernels=())), "kernels": len(program.kernels)}
    return _FILE.lines({"program": described}, program.kernels)


def read(path: Path) -> CompiledProgram:
    """Read the file of a model, completely or not at all.

    Raises:
        HashbenchError: the file cannot be read, is truncated or modified, has another schema, or holds no kernels.
    """
    with _FILE.refusing(path):
        return _program(*_FILE.read_lines(path, ListedKernel, most=_MOST_TEXT))


def _program(content: Any, kernels: tuple[ListedKernel, ...]) -> CompiledProgram:
    """Validate the header of a file; raise ``ValueError`` if it is invalid."""
    described = from_json(_ProgramHeader, content, where="line 1").program
    if described.get("kernels") != len(kernels):
        raise ValueError("it has another number of kernels")
    program = from_json(CompiledProgram, {**described, "kernels": []}, where="line 1: program")
    if program.left_out < 0:
        raise ValueError(f"line 1: program.left_out is {program.left_out!s:.20}")
    return replace(program, kernels=kernels)
