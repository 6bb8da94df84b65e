"""The file round-trips within its limit; a damaged, modified or hostile one is refused as a whole."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench import io
from hashbench.errors import HashbenchError
from hashbench.results import compiled_kernels
from hashbench.results.compiled_kernels import DIGITS, MOST_BYTES, CompiledProgram, ListedKernel

RELU = ListedKernel("cpp_fused_relu_0", "0123456789ab", ("aa",), ("bb", "cc"), ("aten.relu",), "layer1.0")
MM = ListedKernel("extern_kernels.mm", reads=("bb",), writes=("dd",), phase="backward", graph=1)
NET = CompiledProgram("zoo", "net", "training", "cpu", "float32", "inductor", (RELU, MM))


def test_roundtrip(tmp_path: Path) -> None:
    path = compiled_kernels.write(tmp_path, NET)
    assert path == tmp_path / "compiled_kernels" / "zoo.training.net.jsonl.gz"
    assert compiled_kernels.read(path) == NET
    assert path.read_bytes() == compiled_kernels.write(tmp_path, NET).read_bytes()


def test_program_without_kernels(tmp_path: Path) -> None:
    assert compiled_kernels.read(compiled_kernels.write(tmp_path, replace(NET, kernels=()))).kernels == ()


def long_program(calls: int) -> CompiledProgram:
    def words(*numbers: int) -> tuple[str, ...]:
        return tuple(hashlib.sha256(str(number).encode()).hexdigest() for number in numbers)

    return replace(
        NET,
        kernels=tuple(
            ListedKernel(
                f"cpp_fused__native_batch_norm_legit_functional_add_relu_{number}",
                *words(number),
                words(3 * number, 3 * number + 1, 3 * number + 2),
                words(-2 * number, -2 * number - 1),
                ("aten.relu", "aten.add"),
                f"layer{number % 7}.{number % 3}",
            )
            for number in range(1, calls + 1)
        ),
    )


def test_digests_are_shortened(tmp_path: Path) -> None:
    (kernel,) = compiled_kernels.read(compiled_kernels.write(tmp_path, long_program(1))).kernels
    assert {len(digest) for digest in (kernel.source, *kernel.reads, *kernel.writes)} == {DIGITS}


def test_a_thousand_calls_fit(tmp_path: Path) -> None:
    path = compiled_kernels.write(tmp_path, long_program(1000))
    assert path.stat().st_size < MOST_BYTES
    assert compiled_kernels.read(path).left_out == 0


def test_first_calls_of_a_program_that_is_too_long(tmp_path: Path) -> None:
    program = long_program(6000)
    path = compiled_kernels.write(tmp_path, program)
    kept = compiled_kernels.read(path)
    assert 0.95 * MOST_BYTES < path.stat().st_size <= MOST_BYTES
    assert len(kept.kernels) + kept.left_out == 6000
    assert [kernel.name for kernel in kept.kernels] == [kernel.name for kernel in program.kernels[: len(kept.kernels)]]
    assert compiled_kernels.read(compiled_kernels.write(tmp_path, kept)) == kept


Lines = list[Any]


def forged(path: Path, change: Callable[[Lines], object]) -> None:
    """Change the lines of the file, and let its checksum fit."""
    header, *kernels = lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(lines)
    header, *kernels = lines
    path.write_bytes(gzip.compress(io.sealed_text(header, list(map(json.dumps, kernels))).encode()))


REFUSED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "another schema": (lambda it: it[0].update(schema=9), "it has schema version 9, this hashbench reads 1"),
    "no schema": (lambda it: it[0].pop("schema"), "it holds no compiled kernels"),
    "no program": (lambda it: it[0].pop("program"), "line 1 lacks the fields program"),
    "a program that is a list": (lambda it: it[0].update(program=[]), "line 1.program is .*, which is not dict"),
    "a field too many": (lambda it: it[0]["program"].update(more=1), "line 1: program has unknown fields: more"),
    "no name": (lambda it: it[0]["program"].pop("name"), "line 1: program lacks the fields name"),
    "a line too few": (lambda it: it.pop(), "another number of kernels"),
    "a line too many": (lambda it: it.append(it[-1]), "another number of kernels"),
    "a number that is a text": (lambda it: it[0]["program"].update(kernels="2"), "another number of kernels"),
    "fewer left out than none": (lambda it: it[0]["program"].update(left_out=-1), "left_out is -1"),
    "a kernel without a name": (lambda it: it[1].pop("name"), "line 2: kernel lacks the fields name"),
    "a kernel that is a list": (lambda it: it.__setitem__(2, []), "line 3: kernel is .*, which is not dict"),
    "a digest that is no text": (lambda it: it[1].update(reads=[1]), r"kernel.reads\[0\] is '1', which is not str"),
    "a graph that is a text": (lambda it: it[1].update(graph="0"), "kernel.graph is '0', which is not int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, said = REFUSED[name]
    path = compiled_kernels.write(tmp_path, NET)
    forged(path, change)
    refused_in_one_line(path, said)


def refused_in_one_line(path: Path, said: str) -> None:
    with pytest.raises(HashbenchError, match=said) as raised:
        compiled_kernels.read(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"cannot use {path}: ")
    assert str(raised.value).endswith("Sweep the model again with --backend.")


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "it is truncated"),
    "half": (lambda text: text[: len(text) // 2], "it is truncated: its last line has no end"),
    "without its last line": (lambda text: b"".join(text.splitlines(keepends=True)[:-1]), "its checksum is another"),
    "a digest changed": (lambda text: text.replace(b'"bb"', b'"be"', 1), "its checksum is another"),
    "the model changed": (lambda text: text.replace(b'"net"', b'"bet"'), "its checksum is another"),
    "no JSON": (lambda _: b"dev,name,batch_size\n", "line 1 is not JSON"),
    "brackets without end": (lambda _: b"[" * 100_000 + b"\n", r"line 1 is not JSON \(it is nested too deep\)"),
    "a list": (lambda _: b"[1, 2]\n", "it holds no compiled kernels"),
    "no text": (lambda _: b"\xff\xfe{}\n", "it is not a text file"),
    "half of gzip": (lambda text: gzip.compress(text)[:-20], "it is truncated"),
    "gzip with a bit changed": (lambda text: gzip.compress(text)[:-8] + b"\0" * 8, "it is damaged"),
    "a bomb": (lambda _: gzip.compress(bytes(2**25 + 1)), "has more than 32 MiB of text"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    damage, said = DAMAGED[name]
    path = compiled_kernels.write(tmp_path, NET)
    path.write_bytes(damage(gzip.decompress(path.read_bytes())))
    refused_in_one_line(path, said)


def test_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "missing.jsonl.gz", "No such file")


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HashbenchError, match=r"cannot write .*Choose another --output"):
        compiled_kernels.write(tmp_path / "file", NET)
