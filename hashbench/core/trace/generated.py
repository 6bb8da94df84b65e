"""Kernels that Inductor generated, as callees with a plan: one call, one record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hashbench.core.inductor.internals import KernelSite, TritonLaunch, wrapper_of
from hashbench.core.inductor.nodes import BufferFacts, NodeFacts, common
from hashbench.core.inductor.openmp import library_of, one_thread_in
from hashbench.core.trace.op_schema import OpPlan, Pattern


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedKernel:
    """A call of a generated kernel at one line of its module.

    Attributes:
        plan: name of the kernel, and the positions of the arguments that it writes.
        path: file of the generated module.
        line: of the call in that file, from 1.
        buffers: Inductor's name of the buffer at each argument; empty for sizes and where it is unknown.
        types: types of the arguments, in C++, or as Triton has them (``*fp32``).
    """

    plan: OpPlan
    path: str
    line: int
    buffers: tuple[str, ...]
    types: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Call the kernel."""
        return self.plan.call(*args)

    def __str__(self) -> str:
        return self.plan.name

    @property
    def is_triton(self) -> bool:
        """Whether it is a Triton kernel, and not one in C++."""
        return isinstance(self.plan.call, TritonLaunch)

    @property
    def launch(self) -> str:
        """The configuration with which a Triton kernel is launched; empty for any other."""
        return "" if self.plan.launch is None else self.plan.launch()

    @property
    def config(self) -> str:
        """The same as Python; see :meth:`~hashbench.core.inductor.internals.TritonLaunch.expression`."""
        return self.plan.call.expression() if isinstance(self.plan.call, TritonLaunch) else ""

    @property
    def refused(self) -> str:
        """Why an interpreter did not run the last call, whose results ATen computed; empty if it ran."""
        return str(getattr(getattr(self.plan.call, "kernel", None), "refused", ""))

    @property
    def source(self) -> str:
        """The C++ or Triton that it was compiled from; empty if the module's file is gone."""
        kernel = wrapper_of(self.path).kernel(self.plan.name)
        return "" if kernel is None else kernel.source

    def single_thread(self) -> AbstractContextManager[None]:
        """Return a context in which a call runs on one thread, as ``torch.set_num_threads`` cannot achieve.

        Raises:
            LookupError: its OpenMP runtime is not found, or it is a Triton kernel.
        """
        if self.is_triton:
            raise LookupError("a Triton kernel has no threads of the CPU")
        return one_thread_in(library_of(self.plan.call))


def kernel_at(site: KernelSite, line: int) -> GeneratedKernel:
    """Return the kernel that is called at a line of its module: the same object as long as its function is the same."""
    kernel: GeneratedKernel | None = site.facts.derived.get((site.name, line))
    if kernel is None or kernel.plan.call is not site.function:
        site.facts.derived[site.name, line] = kernel = _kernel_at(site, line)
    return kernel


def _kernel_at(site: KernelSite, line: int) -> GeneratedKernel:
    module = wrapper_of(site.path)
    call, kernel = module.calls.get(line), module.kernel(site.name)
    written = () if kernel is None else kernel.writes
    buffers = () if call is None else call.arguments
    facts = common(site.facts[buffers[at]] for at in written if at < len(buffers) and buffers[at] in site.facts)
    filled = (at for at in written if call is not None and at < len(buffers) and buffers[at] and at not in call.reads)
    plan = OpPlan(
        site.name,
        call=site.function,
        written=written,
        writes_arguments=True,
        module=facts.module,
        source=facts.source,
        filled=tuple(filled),
        launch=site.function.configuration if isinstance(site.function, TritonLaunch) else None,
    )
    return GeneratedKernel(plan, site.path, line, buffers, site.types)


def facts_of_line(path: str, line: int, facts: BufferFacts) -> NodeFacts:
    """Return what a line of a generated module, whose buffers stand for ``facts``, computes; empty if unknown."""
    found: NodeFacts | None = facts.derived.get(line)
    if found is None:
        call = wrapper_of(path).calls.get(line)
        facts.derived[line] = found = common(
            facts[name] for name in (() if call is None else call.targets) if name in facts
        )
    return found


GRAPH = "inductor.graph"
"""Name of the record with which the records of a call of a compiled graph begin."""


def graph_plan() -> OpPlan:
    """Return the plan of the record with which a call of a compiled graph begins. It reads and writes nothing."""
    return OpPlan(GRAPH, call=_nothing)


def allocation_plan(name: str, function: Callable[..., Any]) -> OpPlan:
    """Return the plan of an allocator of generated modules."""
    return OpPlan(f"inductor.{name}", call=function, pattern=Pattern.FRESH, blank=True)


def _nothing(*_: Any) -> None: ...
