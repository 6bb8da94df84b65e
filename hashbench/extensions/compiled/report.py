"""Say which kernels of compiled models differ between two sweeps, by source and by bits on equal inputs.

Reads the results folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import RowPair
from hashbench.core.records import Row
from hashbench.core.text import count, join_limited, one_line
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.compiled_kernels import FOLDER, CompiledProgram
from hashbench.extensions.compiled.sources import CompilationDifference, KernelPair, compare

_MODELS = 20
"""Models with a sentence of their own."""

_NAMES = 4
"""Models with equal kernels that are named."""

_OPS = 3
"""Ops of a fused kernel that are named."""

_COLUMNS = ("device", "dtype", "backend")


def compilation_remarks(pairs: Iterable[RowPair], *, base: Sequence[Path], new: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each model whose compiled kernels differ, then one on those whose kernels are equal.

    Args:
        pairs: the rows of a model in both sweeps.
        base: CSVs of the first sweep; the files of compiled kernels are beside them.
        new: those of the second.
    """
    sides = [list(dict.fromkeys(file.parent for file in files)) for files in (base, new)]
    if not all(any((folder / FOLDER).is_dir() for folder in folders) for folders in sides):
        return  # one of them compiled nothing
    clauses = [(after, _clause(after, *sides)) for before, after in pairs if before and after]
    differing = [f"{row.name} ({row.mode}): {clause}." for row, clause in clauses if clause]
    yield from map(one_line, differing[:_MODELS])
    if len(differing) > _MODELS:
        yield f"The compiled kernels of {count(len(differing) - _MODELS, 'more model')} differ or cannot be compared."
    equal = [one_line(row.name) for row, clause in clauses if clause == ""]
    if equal:
        models = f"{count(len(equal), 'model')} ({join_limited(equal, _NAMES)})"
        yield f"The compiled kernels of {models} have the same sources and the same bits."


def _clause(row: Row, base: Sequence[Path], new: Sequence[Path]) -> str | None:
    """Return what differs in the kernels of a row's model; empty if nothing does, ``None`` if neither side has any."""
    try:
        before, after = _recorded(row, base), _recorded(row, new)
    except HashbenchError as error:
        return f"its compiled kernels cannot be compared ({error.consequence})"
    if before is None and after is None:
        return None
    if before is None or after is None:
        return f"it has no compiled kernels in {'BASE' if before is None else 'NEW'}"
    return difference_text(before, after)


def _recorded(row: Row, folders: Sequence[Path]) -> CompiledProgram | None:
    """Return the compiled kernels of a row's model; ``None`` if there are none.

    Raises:
        HashbenchError: the file is damaged, or belongs to another model.
    """
    paths = (compiled_kernels.path_in(folder, suite=row.suite, name=row.name, mode=row.mode) for folder in folders)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    program = compiled_kernels.read(path)
    if (program.suite, program.name, program.mode) != (row.suite, row.name, row.mode):
        raise HashbenchError(f"cannot use {path}", consequence="it is of another model")
    return program


def difference_text(base: CompiledProgram, new: CompiledProgram) -> str:
    """Format what differs between two compilations as one clause; empty if no kernel differs and all were compared.

    ``3 of 82 kernel calls have another source (first: cpp_fused_relu_3, aten.relu), 1 has different bits on equal
    inputs (first: extern_kernels.mm)``.
    """
    others = [f"{name} {getattr(base, name)} → {getattr(new, name)}" for name in _COLUMNS if _differ(base, new, name)]
    if others:
        return f"its compiled kernels cannot be compared ({', '.join(others)})"
    cut = bool(base.left_out), bool(new.left_out)
    difference = compare(base.kernels, new.kernels, cut=cut)
    parts = [", ".join(_differences(difference)), *_limits(difference, base, new)]
    return "; ".join(filter(None, parts))


def _differ(base: CompiledProgram, new: CompiledProgram, name: str) -> bool:
    return bool(getattr(base, name) != getattr(new, name))


def _differences(difference: CompilationDifference) -> Iterator[str]:
    first, second = difference.kernels
    calls = f"{count(second, 'kernel call')}{'' if first == second else f' ({first} in BASE)'}"
    if difference.by_source:
        yield f"{_have(difference.by_source, f'of {calls}')} another source{_first(difference.by_source)}"
    if difference.by_bits:
        of = "" if difference.by_source else f"of {calls}"
        yield f"{_have(difference.by_bits, of)} different bits on equal inputs{_first(difference.by_bits)}"


def _have(pairs: Sequence[KernelPair], of: str) -> str:
    return " ".join(filter(None, (str(len(pairs)), of, "has" if len(pairs) == 1 else "have")))


def _first(pairs: Sequence[KernelPair]) -> str:
    pair = pairs[0]
    kernel = pair.shown
    alone = f"only in {'NEW' if pair.first is None else 'BASE'}" if None in (pair.first, pair.second) else ""
    place = f"{join_limited(kernel.ops, _OPS)}{f' in {kernel.module}' if kernel.module else ''}".strip()
    return f" (first: {', '.join(filter(None, (kernel.name, place, alone, pair.launches)))})"


def _limits(difference: CompilationDifference, base: CompiledProgram, new: CompiledProgram) -> Iterator[str]:
    """Yield what was not compared."""
    unknown = difference.matched - difference.same_inputs
    if unknown:
        calls = "no call" if not difference.same_inputs else count(unknown, "call")
        negated = "" if not difference.same_inputs else "not "
        yield f"the bits of {calls} were {negated}compared (other inputs, or not recorded)"
    for side, program in (("BASE", base), ("NEW", new)):
        if program.left_out:
            verb = "is" if program.left_out == 1 else "are"
            yield f"{count(program.left_out, 'later kernel call')} of {side} {verb} not in its file"
