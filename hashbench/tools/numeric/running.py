"""One model of a pair, run stage by stage without changing it: a copy is run, or, where there is none, the model itself
with everything put back afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.errors import HashbenchError
from hashbench.run.rng import reset_rng_state
from hashbench.run.workload import call
from hashbench.text import squeezed
from hashbench.tools.numeric.compare import leaves_of, without_wrapper
from hashbench.tools.numeric.report import SIDES, STAGES, Rename, Rule
from hashbench.trace.arguments import named_tensors
from hashbench.trace.storage_writers import share_memory

MAIN_RANDOM_SEED = 1337
"""The seed of torch's own numeric check."""

Model = Callable[..., Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Request:
    """What a check was asked for: two models, how both are run, what is compared, and what counts as equal.

    ``training``: true sets ``train()`` and wants gradients, false sets ``eval()`` and runs without, ``None`` leaves the
    mode and takes gradients where the outputs have some. ``loss`` gets the output and returns a scalar; without one it
    is the sum of all outputs.
    """

    before: Model
    after: Model
    inputs: Any
    rule: Rule
    stages: frozenset[str]
    training: bool | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    make_optimizer: MakeOptimizer | None = None
    rename: Rename = None
    iterations: int = 1
    deterministic: str = "on"
    seed: int = MAIN_RANDOM_SEED
    trace: bool = False

    @property
    def stages_run(self) -> tuple[str, ...]:
        """The stages that are run, up to the last one that is compared."""
        last = "buffers"
        if self.training is not False:
            last = next((stage for stage in ("stepped", "gradients") if stage in self.stages), last)
        return STAGES[: STAGES.index(last) + 1]

    def gradients(self) -> contextlib.AbstractContextManager[Any]:
        """No gradients in inference; otherwise as torch has it by default, whatever the caller's mode."""
        return torch.no_grad() if self.training is False else torch.enable_grad()


class Subject:
    """A model that may be changed, and its run so far."""

    def __init__(self, model: Model, request: Request, *, copied: bool) -> None:
        self.model, self.request, self.copied = model, request, copied
        self.module = model if isinstance(model, torch.nn.Module) else None
        self.has_gradient = False
        self._optimizer: torch.optim.Optimizer | None = None

    def iteration(self, inputs: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every stage of one iteration with its values by name, each run when it is asked for, in the reset random
        state. It ends with the buffers where no output has a gradient. ``inputs`` may be changed."""
        stages = self.request.stages_run
        yield "parameters", self.parameters()
        if self.module is not None:
            self.module.zero_grad(set_to_none=True)
        reset_rng_state(self.request.seed)
        output = call(self.model, inputs)  # type: ignore[arg-type]  # any callable will do
        self.has_gradient = any(tensor.requires_grad for _, tensor in named_tensors(output))
        yield "outputs", leaves_of(output, "output")
        yield "buffers", self.buffers()
        if "gradients" not in stages or not self.has_gradient:
            return
        reset_rng_state(self.request.seed)
        torch.autograd.backward(_sum_of(output) if self.request.loss is None else self.request.loss(output))
        del output
        yield "gradients", self._gradients(inputs)
        if "stepped" in stages:
            reset_rng_state(self.request.seed)
            self._step()
            yield "stepped", self.parameters()

    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        named = self.module.named_parameters() if self.module is not None else ()
        return {without_wrapper(name): tensor for name, tensor in named}

    def buffers(self) -> dict[str, Any]:
        """The buffers by name."""
        named = self.module.named_buffers() if self.module is not None else ()
        return {without_wrapper(name): tensor for name, tensor in named}

    def _gradients(self, inputs: Any) -> dict[str, Any]:
        """Those of parameters, ``None`` where there is none, and of the inputs that require one."""
        return {name: parameter.grad for name, parameter in self.parameters().items()} | {
            f"input.{path}": tensor.grad
            for path, tensor in named_tensors(inputs)
            if tensor.requires_grad and tensor.is_leaf
        }

    def _step(self) -> None:
        """A step of the caller's optimizer, else of SGD with ``lr=0.01``, as torch's own check has it."""
        trained = [parameter for parameter in self.parameters().values() if parameter.requires_grad]
        if not trained:
            return
        if self._optimizer is None:
            make = self.request.make_optimizer
            self._optimizer = torch.optim.SGD(trained, lr=0.01) if make is None else make(trained)
        self._optimizer.step()


def _sum_of(output: Any) -> torch.Tensor:
    sums = [tensor.sum() for _, tensor in named_tensors(output) if tensor.requires_grad]
    real = [torch.view_as_real(item).sum() if item.is_complex() else item for item in sums]
    return torch.stack([item.to(real[0].device, torch.float64) for item in real]).sum() if len(real) > 1 else real[0]


@contextlib.contextmanager
def subject_of(request: Request, side: str, notes: list[str]) -> Iterator[Subject]:
    """A subject for a while: a deep copy of the model ``before`` or ``after``, else the model itself, which is then as
    it was before. What a reader must know of that is added to ``notes``."""
    model = request.before if side == SIDES[0] else request.after
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise HashbenchError(
                f"the model {side} is a {type(model).__name__}, which cannot be called",
                tip="Give a torch.nn.Module, or a function of the inputs.",
            )
        notes.append(f"the model {side} is no module: it has no parameters, and what it changes is not put back")
        yield Subject(model, request, copied=False)
        return
    copied, reason = _copy_of(model)
    with contextlib.nullcontext(copied) if copied is not None else _put_back(model) as module:
        if copied is None:
            notes.append(
                f"the model {side} ran itself, for it cannot be copied ({reason}): "
                "parameters, buffers, gradients and modes were put back"
            )
        if request.training is not None:
            module.train(request.training)
        yield Subject(module, request, copied=copied is not None)


def _copy_of(model: torch.nn.Module) -> tuple[torch.nn.Module | None, str]:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        return None, squeezed(f"{type(error).__name__}: {error}", 100)
    return (None, "its deep copy shares its memory") if share_memory(model, copied) else (copied, "")


@contextlib.contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model, in which everything that a step changes is as it was before on leaving."""
    modes = {module: module.training for module in model.modules()}
    slots = [(module._buffers, name, value) for module in model.modules() for name, value in module._buffers.items()]
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    contents = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield model
    finally:
        for buffers, name, value in slots:
            buffers[name] = value
        with torch.no_grad():
            for tensor, content in contents:
                tensor.detach().copy_(content)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
