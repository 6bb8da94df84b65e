"""A kernel and its reference: what is judged, and the judging of one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.extensions.kernels.calls import Called, Caller, Function, leaving
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.judged import JudgedKernelCall, judge

_SMALL = 2**18
"""Inputs with at most so many elements in all are judged on one thread: more of them only wait for each other."""


@dataclass(frozen=True, slots=True)
class KernelTask:
    """What is judged: the results of a kernel, or their gradients.

    Attributes:
        kernel: of the inputs.
        reference: of the inputs, plain torch.
        inputs: as they are given.
        names: of the results; empty: they are called by their place.
        seed: of variations and of random rounding.
        approximate: what the kernel claims.
    """

    kernel: Function
    reference: Function
    inputs: KernelInputs
    names: tuple[str, ...] = ()
    seed: int = 1337
    approximate: float | None = None

    @property
    def gradients(self) -> bool:
        """Whether gradients are judged."""
        return bool(self.names)


class KernelUnderTest:
    """Calls the kernel of a task, and judges its calls by the reference.

    Attributes:
        task: what is judged.
        kernel: calls the kernel.
        reference: calls the reference in its own dtype.
        judged_by: the reference, which may also return what it leaves in its inputs.
        runs: of the reference for the inputs as they are given.
    """

    def __init__(self, task: KernelTask) -> None:
        names = task.names
        self.task = task
        self.kernel = Caller(
            task.kernel,
            seed=task.seed,
            gradients=task.gradients,
            names=(lambda count: names[:count]) if names else None,
        )
        self.reference = Caller(task.reference, seed=task.seed, gradients=task.gradients, tensors=True)
        self.judged_by = task.reference
        self.runs = self.runs_of(task.inputs)

    def runs_of(self, inputs: KernelInputs) -> ReferenceRuns:
        """Return the runs of the reference for inputs."""
        args, kwargs = inputs.arguments()
        return ReferenceRuns(self.judged_by, args, kwargs, seed=self.task.seed)

    def judge(self, called: Called, runs: ReferenceRuns, *, excused: Sequence[torch.Tensor] = ()) -> JudgedKernelCall:
        """Judge a call by runs of the reference; excused elements may be anything.

        Raises:
            NotJudgedError: the reference cannot tell.
            Exception: whatever the reference raises.
        """
        with threads_for(called.given):
            return judge(called, runs, approximate=self.task.approximate, excused=excused)

    def leave(self, own: Called) -> None:
        """Judge what the reference leaves in its inputs, too.

        Args:
            own: its call, which wrote some.
        """
        inputs, written = self.task.inputs, sorted(own.written)
        returns = bool(own.results) and bool(self.kernel(inputs).results)
        afterwards = tuple(f"{inputs.names()[number]} afterwards" for number in written)

        def names(count: int) -> tuple[str, ...]:
            plain = count - len(afterwards)
            return (*(["output"] if plain == 1 else [f"output.{k}" for k in range(plain)]), *afterwards)

        self.judged_by = leaving(self.task.reference, written, returns=returns)
        kernel = leaving(self.task.kernel, written, returns=returns)
        self.kernel = Caller(kernel, seed=self.task.seed, gradients=self.task.gradients, names=names)
        self.runs = self.runs_of(inputs)


@contextmanager
def threads_for(inputs: KernelInputs) -> Iterator[None]:
    """Compute on one thread where the inputs are small."""
    before = torch.get_num_threads()
    few = before > 1 and sum(tensor.numel() for _, tensor in inputs.tensors()) <= _SMALL
    if few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if few:
            torch.set_num_threads(before)
