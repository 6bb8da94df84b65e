"""One model of a pair, run stage by stage without changing it: a copy is run, or, where there is none, the model itself
with everything put back afterwards."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.errors import HashbenchError
from hashbench.run.inputs import call, clone_inputs
from hashbench.run.rng import reset_rng_state
from hashbench.text import squeezed
from hashbench.tools.numeric.findings import without_wrapper
from hashbench.tools.numeric.measuring import leaves_of
from hashbench.trace.arguments import named_tensors
from hashbench.trace.storage_writers import share_memory

MAIN_RANDOM_SEED = 1337
"""The seed of torch's own numeric check."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Plan:
    """How both models are run. ``training``: true sets ``train()`` and wants gradients, false sets ``eval()`` and runs
    without, ``None`` leaves the mode and takes gradients where the outputs have some. ``loss`` gets the output and
    returns a scalar; without one it is the sum of all outputs. ``stages`` are those that are compared."""

    inputs: Any
    stages: frozenset[str]
    training: bool | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    make_optimizer: MakeOptimizer | None = None
    seed: int = MAIN_RANDOM_SEED

    @property
    def differentiates(self) -> bool:
        """Whether a backward is wanted at all."""
        return self.training is not False and bool(self.stages & {"gradients", "stepped"})

    @property
    def steps(self) -> bool:
        """Whether an optimizer is."""
        return self.differentiates and "stepped" in self.stages


class Subject:
    """A model that may be changed, and what its run has made so far. Every stage begins in the reset random state."""

    def __init__(self, model: Callable[..., Any], plan: Plan, *, copied: bool = True) -> None:
        self.model, self.plan, self.copied = model, plan, copied
        self.module = model if isinstance(model, torch.nn.Module) else None
        self._optimizer: torch.optim.Optimizer | None = None
        self._inputs: Any = None
        self._output: Any = None

    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {} if self.module is None else _named(self.module.named_parameters())

    def buffers(self) -> dict[str, Any]:
        """The buffers by name."""
        return {} if self.module is None else _named(self.module.named_buffers())

    def set_inputs(self, inputs: Any) -> None:
        """The inputs of the next forward, which may change them."""
        self._inputs = inputs

    def forward(self) -> dict[str, Any]:
        """The outputs by name."""
        if self.module is not None:
            self.module.zero_grad(set_to_none=True)
        reset_rng_state(self.plan.seed)
        self._output = call(self.model, self._inputs)  # type: ignore[arg-type]  # any callable will do
        return leaves_of(self._output, "output")

    @property
    def has_gradient(self) -> bool:
        """Whether the last forward left anything to differentiate."""
        return any(tensor.requires_grad for _, tensor in named_tensors(self._output))

    def backward(self) -> dict[str, Any]:
        """The gradients of parameters, ``None`` where there is none, and of those inputs that require one."""
        reset_rng_state(self.plan.seed)
        loss = self.plan.loss(self._output) if self.plan.loss is not None else _sum_of(self._output)
        torch.autograd.backward(loss)
        self._output = None
        found = {name: parameter.grad for name, parameter in self.parameters().items()}
        return found | {
            f"input.{path}": tensor.grad
            for path, tensor in named_tensors(self._inputs)
            if tensor.requires_grad and tensor.is_leaf
        }

    def step(self) -> dict[str, Any]:
        """The parameters after a step of the optimizer: the caller's, else SGD with ``lr=0.01``, as torch's own."""
        reset_rng_state(self.plan.seed)
        trained = [parameter for parameter in self.parameters().values() if parameter.requires_grad]
        if not trained:
            return self.parameters()
        if self._optimizer is None:
            make = self.plan.make_optimizer
            self._optimizer = torch.optim.SGD(trained, lr=0.01) if make is None else make(trained)
        self._optimizer.step()
        return self.parameters()


def _named(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {without_wrapper(name): tensor for name, tensor in named}


def _sum_of(output: Any) -> torch.Tensor:
    sums = [tensor.sum() for _, tensor in named_tensors(output) if tensor.requires_grad]
    real = [torch.view_as_real(item).sum() if item.is_complex() else item for item in sums]
    return torch.stack([item.to(real[0].device, torch.float64) for item in real]).sum() if len(real) > 1 else real[0]


@contextlib.contextmanager
def subject_of(model: Callable[..., Any], plan: Plan, *, side: str, notes: list[str]) -> Iterator[Subject]:
    """A subject for a while: a deep copy of the model, else the model itself, which is then as it was before. What a
    reader must know of that is added to ``notes``."""
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise HashbenchError(
                f"the model {side} is a {type(model).__name__}, which cannot be called",
                tip="Give a torch.nn.Module, or a function of the inputs.",
            )
        notes.append(f"the model {side} is no module: it has no parameters, and what it changes is not put back")
        yield Subject(model, plan, copied=False)
        return
    copied, reason = _copy_of(model)
    with contextlib.nullcontext() if copied is not None else _put_back(model):
        if copied is None:
            notes.append(
                f"the model {side} ran itself, for it cannot be copied ({reason}): "
                "parameters, buffers, gradients and modes were put back"
            )
        module = model if copied is None else copied
        if plan.training is not None:
            module.train(plan.training)
        if copied is None:  # else its gradients would be added to, and are the caller's
            for parameter in module.parameters():
                parameter.grad = None
        yield Subject(module, plan, copied=copied is not None)


def _copy_of(model: torch.nn.Module) -> tuple[torch.nn.Module | None, str]:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        return None, squeezed(f"{type(error).__name__}: {error}", 100)
    if share_memory(model, copied):
        return None, "its deep copy shares its memory"
    return copied, ""


@contextlib.contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """Everything in a model that a step changes is as it was before."""
    modes = {module: module.training for module in model.modules()}
    slots = [(module._buffers, name, value) for module in model.modules() for name, value in module._buffers.items()]
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
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


def fresh_inputs(plan: Plan) -> Any:
    """Inputs that a run may change."""
    return clone_inputs(plan.inputs)


def gradients_wanted(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """No gradients in inference; otherwise as torch has it by default, whatever the caller's mode."""
    return torch.no_grad() if plan.training is False else torch.enable_grad()


def is_compiled(model: Callable[..., Any]) -> bool:
    """Whether ``torch.compile`` has wrapped the model, a module in it, or the function; its ops may be hidden."""
    evaluation = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    if evaluation is None:
        return False
    if not isinstance(model, torch.nn.Module):
        return hasattr(model, "_torchdynamo_orig_callable")
    return any(
        isinstance(module, evaluation.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )
