"""Compile a model again and again, and compare what each compilation computes with the first one, bit by bit."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hashbench.core.diagnose import fresh_process
from hashbench.core.inductor.graphs import CompiledGraph
from hashbench.core.inductor.internals import CapturedGraphs, clear_compiler_caches, compile_threads
from hashbench.core.processes import tell_phase, variables
from hashbench.core.records import Failure, ModelSpec, Result, RunOptions, TensorDigest, Trace
from hashbench.core.run.outcome import RunMaker
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import deterministic_settings
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.compiled_kernels import CompiledProgram, ListedKernel
from hashbench.extensions.compiled.facts import NOT_COMPARED
from hashbench.extensions.compiled.kernel_list import AnyGraph, KernelList
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.program import compiling, runs_under
from hashbench.extensions.compiled.sources import CompilationDifference, compare
from hashbench.extensions.compiled.varieties import Cache, Variety


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation computes.

    Attributes:
        results: digests of its results by name.
        kernels: of its first step.
        error: of the run; empty if it succeeded.
    """

    results: Mapping[str, TensorDigest] = field(default_factory=dict)
    kernels: tuple[ListedKernel, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    """A further compilation, compared with the first one.

    Attributes:
        variety: what it changes.
        results: names of results with other bits.
        difference: of the kernels; ``None`` if one of the two was not listed.
        note: why it was not compared; empty if it was.
    """

    variety: Variety
    results: tuple[str, ...] = ()
    difference: CompilationDifference | None = None
    note: str = ""

    @property
    def differs(self) -> bool:
        """True if a result has other bits."""
        return bool(self.results)

    def word(self) -> str:
        """Format for a cell: ``same``, ``3 results differ, first cpp_fused_add_0``."""
        if self.note:
            return f"{NOT_COMPARED} ({self.note})"
        if not self.results:
            return "same"
        first = self.difference.first if self.difference is not None else None
        kernel = f", first {first.shown.name}" if first is not None else ""
        return f"{len(self.results)} results differ{kernel}"


InProcess = Callable[[Variety], Compiled]
"""Compiles in a fresh process with the variables of a variety."""


def compiled_again(
    make: Callable[[], RunMaker], first: Compiled, varieties: Sequence[Variety], in_process: InProcess
) -> Iterator[Again]:
    """Compile with each variety in turn, and compare with the first compilation.

    Args:
        make: a new program of the same model.
        first: what the first compilation computed.
        varieties: in the order in which they are compiled.
        in_process: compiles in a fresh process.
    """
    with contextlib.ExitStack() as stack:
        folder = ""
        for variety in varieties:
            tell_phase(f"compilation: {variety.name}")
            if variety.in_fresh_process:
                made = in_process(variety)
            else:
                if variety.cache is Cache.FRESH or not folder:
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hashbench-inductor-"))
                    if variety.cache is Cache.WARM:
                        _compiled(make, variety, folder)
                made = _compiled(make, variety, folder)
            yield _compared(variety, first, made)


def _compiled(make: Callable[[], RunMaker], variety: Variety, folder: str) -> Compiled:
    options = variety.options_beside(compile_threads())
    with _cache_in(folder), compiling(options, graph_caches=True):
        return listed(make())


class FreshCompilation:
    """Target of a fresh process: compiles a model there, and leaves its kernels in ``options.output``.

    Args:
        options: as in a sweep.
    """

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def traces_of(
        self,
        spec: ModelSpec,
        *,
        level: str,
        runs: int,  # noqa: ARG002
        threads: int | None = None,  # noqa: ARG002
    ) -> list[Trace | Failure]:
        """Return the trace of a compiled run, whose results are compared by their digests."""
        from hashbench.core.check.model import BenchmarkRunner

        runner = BenchmarkRunner(self._options)
        with preserved_rng(), deterministic_settings(level, threads=self._options.threads), runner.pick_grad():
            workload = runner.prepare(runner.load_model(spec))
            with compiling():
                made = listed(runs_under(runner, workload, spec.optimizer, backend=self._options.backend))
        if made.error:
            return [Failure(made.error)]
        program = program_of(spec, self._options, made.kernels)
        compiled_kernels.write(Path(self._options.output), program)
        return [Trace((), results=tuple(Result(name, digest) for name, digest in made.results.items()))]


def in_fresh_process(spec: ModelSpec, options: RunOptions, level: str, seconds: float) -> Compiled:
    """Compile a model in a fresh process with random string hashes."""
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        asked = replace(options, output=folder)
        fresh = fresh_process.fresh_traces(
            spec, asked, level=level, processes=1, runs=1, fixed_order=False, timeout=seconds, target=_TARGET
        )
        if not fresh.processes or not fresh.processes[0]:
            return Compiled(error=fresh.failures[0] if fresh.failures else "nothing came back")
        trace = fresh.processes[0][0]
        path = compiled_kernels.path_in(Path(folder), suite=spec.suite, name=spec.name, mode=options.mode)
        kernels = compiled_kernels.read(path).kernels if path.exists() else ()
        return Compiled({result.name: result.digest for result in trace.results}, kernels)


_TARGET = "hashbench.extensions.compiled.compilations:FreshCompilation"


def program_of(spec: ModelSpec, options: RunOptions, kernels: tuple[ListedKernel, ...]) -> CompiledProgram:
    """Return the kernels of a model as the file has them."""
    return CompiledProgram(
        spec.suite, spec.name, options.mode, options.device, options.dtype_column, options.backend, kernels
    )


def listed(program: RunMaker, known: Mapping[str, CompiledGraph] | None = None) -> Compiled:
    """Run a program once and list the kernels of its first step; graphs are captured unless they are ``known``."""
    with CapturedGraphs() as hooks:
        first = program()
        if isinstance(first, Failure):
            return Compiled(error=first.error)
        kernels = KernelList()
        graphs = AnyGraph(hooks.graphs if known is None else known)
        again = program(watcher=KernelWatcher(graphs, kernels))
        return Compiled(first.noted, () if isinstance(again, Failure) else kernels.result())


def _compared(variety: Variety, first: Compiled, made: Compiled) -> Again:
    if made.error or first.error:
        return Again(variety, note=made.error or first.error)
    names = [name for name in {**first.results, **made.results} if first.results.get(name) != made.results.get(name)]
    sides = _told_alike(first.kernels, made.kernels)
    return Again(variety, tuple(names), compare(*sides) if all(sides) else None)


def _told_alike(*sides: tuple[ListedKernel, ...]) -> list[tuple[ListedKernel, ...]]:
    """Return the calls without what they compute, if that is not known of one side: its graphs came out of a cache."""
    if len({any(kernel.ops for kernel in kernels) for kernels in sides}) == 1:
        return [*sides]
    return [tuple(replace(kernel, ops=(), module="") for kernel in kernels) for kernels in sides]


@contextlib.contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Let the compiler's caches be in a folder."""
    with variables({"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}):  # noqa: PTH118
        clear_compiler_caches()
        try:
            yield
        finally:
            clear_compiler_caches()
