"""The file round-trips within its limit; a damaged, modified or hostile one is refused as a whole."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzzing
import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.compiled_kernels import DIGITS, MOST_BYTES, CompiledProgram, ListedKernel

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


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


REFUSED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "another schema": (lambda it: it[0].update(schema=9), "it has schema version 9, this hashbench reads 1"),
    "no schema": (lambda it: it[0].pop("schema"), "it holds no compiled kernels"),
    "no program": (lambda it: it[0].pop("program"), "line 1 lacks the fields program"),
    "a field too many": (lambda it: it[0]["program"].update(more=1), "line 1: program has unknown fields: more"),
    "a line too few": (lambda it: it.pop(), "another number of kernels"),
    "a line too many": (lambda it: it.append(it[-1]), "another number of kernels"),
    "fewer left out than none": (lambda it: it[0]["program"].update(left_out=-1), "left_out is -1"),
    "a kernel without a name": (lambda it: it[1].pop("name"), "line 2 lacks the fields name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, said = REFUSED[name]
    path = compiled_kernels.write(tmp_path, NET)
    lines = lines_of(path)
    change(lines)
    path.write_bytes(fuzzing.forged(lines))
    refused_in_one_line(path, said)


def refused_in_one_line(path: Path, said: str) -> None:
    with pytest.raises(HashbenchError, match=said) as raised:
        compiled_kernels.read(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"cannot use the compiled kernels in {path}: ")
    assert str(raised.value).endswith("Sweep the model again with --backend.")


def test_damaged_file_is_refused_as_a_whole(tmp_path: Path) -> None:
    path = compiled_kernels.write(tmp_path, NET)
    content = gzip.decompress(path.read_bytes())
    assert not any(found for _, found in fuzzing.readings(path, fuzzing.damaged(content), compiled_kernels.read))


def test_odd_values_with_a_fitting_checksum_are_refused_or_read_as_what_they_are(tmp_path: Path) -> None:
    path = compiled_kernels.write(tmp_path, NET)
    bad = fuzzing.altered_lines(lines_of(path), most=300)
    found = [read for _, read in fuzzing.readings(path, bad, compiled_kernels.read)]
    assert 100 < found.count(None) < len(found)


def test_text_has_a_limit(tmp_path: Path) -> None:
    path = compiled_kernels.write(tmp_path, NET)
    path.write_bytes(gzip.compress(bytes(2**25 + 1)))
    refused_in_one_line(path, "has more than 32 MiB of text")


def test_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "missing.jsonl.gz", "No such file")


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HashbenchError, match=r"cannot write .*Choose another --output"):
        compiled_kernels.write(tmp_path / "file", NET)
