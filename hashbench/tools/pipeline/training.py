"""The first steps of the user's model on the user's batches: traced, with the first outputs of every layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.records import Trace
from hashbench.run.outputs import NotComparableError, flatten, state_results
from hashbench.run.settings import settings
from hashbench.run.workload import map_tensors, mean_of_outputs
from hashbench.tools.pipeline.config import Config
from hashbench.tools.pipeline.observed import Outputs, Weights
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import named_tensors
from hashbench.trace.digest import digest, dtype_name

NO_MODEL = "the pipeline has no make_model"


@dataclass(frozen=True, slots=True)
class Trained:
    """What the first steps left."""

    outputs: Outputs
    layers: tuple[tuple[str, ...], ...] | None
    trace: Trace | None


def weights_of(model: torch.nn.Module | None) -> Weights:
    """The digests of all parameters and buffers."""
    if model is None:
        return Weights(None, None, dict.fromkeys(("parameters", "buffers"), NO_MODEL))
    with torch.no_grad():
        parameters = {name: digest(tensor.detach()).word() for name, tensor in model.named_parameters()}
        buffers = {name: digest(tensor).word() for name, tensor in model.named_buffers()}
    return Weights(parameters, buffers)


def first_steps(config: Config, model: torch.nn.Module | None, batches: Sequence[Any]) -> Trained:
    """Train ``model`` for one step on each batch.

    Raises:
        Exception: whatever the user's functions raise.
    """
    if model is None:
        absent = dict.fromkeys(("predictions", "shown", "losses"), NO_MODEL)
        return Trained(Outputs(None, None, None, absent), None, None)
    optimizer = _optimizer(config, model)
    trace = HashDebugTrace(model=model, settings=settings)
    layers: list[tuple[str, ...]] = []
    losses: list[str] = []
    first = Outputs(None, None, None)
    for step, batch in enumerate(batches):
        batch = _on_device_of(model, batch)
        with _disable_current_modes(), torch.no_grad():
            trace.register_inputs({f"step{step}": batch})
        trace.iteration = step
        with trace:
            with _inspected(model, layers) if step == 0 else contextlib.nullcontext():
                output = _forward(config, model, batch)
            if step == 0:
                first = _outputs(output)
            loss = _loss(config, output, batch) if optimizer is not None or config.part("loss") else None
            if loss is not None and optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        _note(trace, f"output.{step}", output)
        if loss is not None:
            losses.append(repr(float(loss.detach())))
            trace.add_result(f"loss.{step}", loss.detach())
    for name, value in state_results(model, optimizer):
        trace.add_result(name, value)
    why = {} if losses else {"losses": "the model has no parameter that learns, and the pipeline no loss"}
    outputs = replace(first, losses=tuple(losses) or None, absent={**first.absent, **why})
    return Trained(outputs, tuple(layers), trace.finish())


def _outputs(first: Any) -> Outputs:
    """The first outputs, before later steps can change them."""
    try:
        leaves = list(flatten(first, "output"))
    except NotComparableError as error:
        reason = f"the output cannot be hashed: {error}"
        return Outputs(None, None, None, {"predictions": reason, "shown": reason})
    with _disable_current_modes(), torch.no_grad():
        digests = {
            name: digest(value).word() if isinstance(value, torch.Tensor) else repr(value) for name, value in leaves
        }
        return Outputs(digests, {name: _shown(value) for name, value in leaves}, None)


def _shown(value: Any, *, most: int = 10) -> tuple[str, ...]:
    """The first few numbers of a tensor, in full precision, for people to read."""
    if not isinstance(value, torch.Tensor):
        return (repr(value)[:200],)
    return tuple(repr(number) for number in value.detach().reshape(-1)[:most].cpu().tolist())


def _note(trace: HashDebugTrace, name: str, output: Any) -> None:
    with contextlib.suppress(NotComparableError):  # said in the outputs' own file
        for leaf, value in flatten(output, name):
            trace.add_result(leaf, value)


# ---------------------------------------------------------------------------------------- the parts' own defaults


def _optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = config.part("make_optimizer")
    if make is not None:
        return make(model.parameters())  # type: ignore[no-any-return]
    return torch.optim.SGD(learning, lr=0.01) if learning else None


def _forward(config: Config, model: torch.nn.Module, batch: Any) -> Any:
    forward = config.part("forward")
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (list, tuple)) else model(batch)


def _loss(config: Config, output: Any, batch: Any) -> torch.Tensor:
    loss = config.part("loss")
    if loss is not None:
        return loss(output, batch)  # type: ignore[no-any-return]
    targets = batch[1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
    if (
        isinstance(output, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and targets.dtype is torch.int64
        and output.dim() == targets.dim() + 1
    ):
        return torch.nn.functional.cross_entropy(output, targets)
    given = getattr(output, "loss", None)
    return given if isinstance(given, torch.Tensor) else mean_of_outputs(output)


def _on_device_of(model: torch.nn.Module, batch: Any) -> Any:
    """Tensors of a batch on the model's device; on the CPU the batch itself."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return batch if device.type == "cpu" else map_tensors(batch, lambda tensor: tensor.to(device))


# ------------------------------------------------------------------------------------------------- the layers


@contextlib.contextmanager
def _inspected(model: torch.nn.Module, rows: list[tuple[str, ...]]) -> Iterator[None]:
    """Every module's outputs, as rows of ``checkfolder.LAYER_COLUMNS``, in the order in which the modules return."""
    calls: dict[str, int] = {}

    def hook(name: str, module: torch.nn.Module, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        with _disable_current_modes(), torch.no_grad():
            for path, tensor in named_tensors(output):
                rows.append((name, type(module).__name__, str(number), path, *_statistics(tensor)))

    handles = [
        module.register_forward_hook(lambda module, _, output, name=name: hook(name, module, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _statistics(tensor: torch.Tensor) -> tuple[str, ...]:
    """Shape, dtype, mean, standard deviation, least, greatest and digest; empty where there is no such number."""
    shape, dtype = "x".join(map(str, tensor.shape)), dtype_name(tensor.dtype)
    numbers = [""] * 4
    if tensor.layout is torch.strided and tensor.numel() and not tensor.is_complex() and not tensor.is_quantized:
        values = tensor.detach().double()
        statistics = (values.mean(), values.std(correction=0), values.min(), values.max())
        numbers = [repr(float(number)) for number in statistics]
    return shape, dtype, *numbers, digest(tensor.detach()).value
