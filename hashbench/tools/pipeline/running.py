"""Run a pipeline once, in the process created for it: record everything, trace the model's first steps, write the
files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.io import PACKAGE_PARENT, replace_file
from hashbench.core.processes import end_with_input, exit_at_once
from hashbench.core.records import Trace
from hashbench.core.run.environment import collect, package_versions
from hashbench.core.run.leaves import NotComparableError, flatten
from hashbench.core.run.outputs import state_results
from hashbench.core.run.rng import global_state_digests
from hashbench.core.run.settings import settings
from hashbench.core.run.workload import map_tensors, mean_of_outputs
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import named_tensors
from hashbench.core.trace.digest import digest, dtype_name, untraced
from hashbench.tools.pipeline import observed
from hashbench.tools.pipeline.checking import ANSWER_FILE, Config, load_config
from hashbench.tools.pipeline.loading import facts_of, given_generators, hash_calls, listed_folders
from hashbench.tools.pipeline.observed import (
    BatchRecords,
    Digests,
    Observed,
    Outputs,
    RandomState,
    Sample,
    Surroundings,
    Weights,
)
from hashbench.tools.pipeline.recording import first_batches

_NO_MODEL = "the pipeline has no make_model"
_PACKAGES = (
    *("pillow", "opencv-python", "opencv-python-headless", "albumentations", "kornia", "datasets", "webdataset"),
    *("h5py", "lmdb", "pyarrow", "pandas", "scikit-image", "scipy", "torchaudio", "torchcodec"),
)


def observe(path: Path, *, hash_seed: str, hash_seed_by: str, tracer: str = "auto") -> Observed:
    """Run the pipeline of a configuration and return its record. Seeds nothing by itself.

    Raises:
        HashbenchError: the configuration cannot be used, or one of its functions raised; with its message.
    """
    moments: dict[str, Digests] = {}

    def note(moment: str) -> None:
        moments[moment] = global_state_digests()

    note("start")
    known = set(sys.modules)
    with listed_folders() as listed:
        with _part_named(path, "its import"):
            config = load_config(path)
        modules = _modules_of_users(known)
        note("imported")
        set_seed = config.functions.get("set_seed")
        if set_seed is not None:
            with _part_named(path, "set_seed"):
                set_seed(config.seed)
        note("seeded")
        with _part_named(path, "make_loader"):
            loader = config.functions["make_loader"](config.seed)
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            consequence = "it gives no batches, so nothing was compared"
            tip = "Return a torch.utils.data.DataLoader, or anything else that yields batches."
            raise _wrong_kind(path, "make_loader", loader, consequence, tip)
        note("loader made")
    model = _model(path, config)
    note("model made")
    given = given_generators(loader)
    weights = weights_of(model)
    with _part_named(path, "its loader"):
        batches, seen, workers = first_batches(loader, steps=config.steps, modules=modules, note=note)
    if not batches:
        raise HashbenchError(
            f"the loader of {path} is empty",
            consequence="it returned no batch, so nothing can be compared",
            tip="Check its dataset, and drop_last.",
        )
    facts, root = facts_of(loader, seed=config.seed, batches=seen, given=given, listed=listed)
    with _part_named(path, "its model"):
        outputs, layers, trace = first_steps(config, model, batches, tracer=tracer)
    parameter = next(model.parameters(), None) if model is not None else None
    machine = collect("cpu" if parameter is None else parameter.device.type, tracer=tracer)
    if hash_seed_by == "hashbench":
        machine["variables"].pop("PYTHONHASHSEED", None)
    machine["packages"] |= package_versions(_PACKAGES)
    modules = _modules_of_users(known)
    return Observed(
        surroundings=Surroundings(machine, settings(), hash_seed, hash_seed_by, modules, hash_calls(modules)),
        random_state=RandomState(moments, workers),
        loader=facts,
        batches=_relative(seen, root),
        weights=weights,
        outputs=outputs,
        layers=layers,
        trace=trace,
    )


@contextlib.contextmanager
def _part_named(path: Path, part: str) -> Iterator[None]:
    """Raise an exception of user code as HashbenchError, with its own message, and print the whole traceback."""
    try:
        yield
    except HashbenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        consequence = f"{part} raised {named_line(error)}; nothing was compared"
        raise HashbenchError(f"cannot run the pipeline {path}", consequence=consequence) from error


def _model(path: Path, config: Config) -> torch.nn.Module | None:
    make = config.functions.get("make_model")
    if make is None:
        return None
    with _part_named(path, "make_model"):
        model = make()
    if not isinstance(model, torch.nn.Module):
        raise _wrong_kind(path, "make_model", model, "nothing was compared", "Return a torch.nn.Module.")
    return model


def _wrong_kind(path: Path, function: str, value: object, consequence: str, tip: str) -> HashbenchError:
    what = f"{function} of {path} returned a {type(value).__name__}"
    return HashbenchError(what, consequence=consequence, tip=tip)


def _modules_of_users(known: set[str]) -> tuple[str, ...]:
    """List the user's modules imported since, in order: those outside the folders of Python and of packages."""
    packages = Path(torch.__file__).parents[1]
    python = (sys.prefix, sys.base_prefix, Path(os.__file__).parent, packages, PACKAGE_PARENT + "/hashbench")
    foreign = tuple(os.path.realpath(folder) + os.sep for folder in python)
    modules = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in known and isinstance(file, str) and "site-packages" not in file:
            modules += [] if os.path.realpath(file).startswith(foreign) else [name]
    return tuple(modules)


def _relative(seen: BatchRecords, root: str) -> BatchRecords:
    """Make the files' names relative to ``root``, so that another machine may keep them elsewhere."""
    if not root:
        return seen

    def changed(sample: Sample) -> Sample:
        files = sample.files and tuple(os.path.relpath(file, root) for file in sample.files)
        return replace(sample, files=files)

    return replace(
        seen,
        batches=tuple(
            replace(batch, samples=None if batch.samples is None else tuple(map(changed, batch.samples)))
            for batch in seen.batches
        ),
    )


# ---------------------------------------------------------------------------------------- the first steps of the model


def weights_of(model: torch.nn.Module | None) -> Weights:
    """Return the digests of all parameters and buffers."""
    if model is None:
        return Weights(None, None, dict.fromkeys(("parameters", "buffers"), _NO_MODEL))
    with torch.no_grad():
        parameters = {name: digest(tensor.detach()).word() for name, tensor in model.named_parameters()}
        buffers = {name: digest(tensor).word() for name, tensor in model.named_buffers()}
    return Weights(parameters, buffers)


def first_steps(
    config: Config, model: torch.nn.Module | None, batches: Sequence[Any], *, tracer: str = "auto"
) -> tuple[Outputs, tuple[tuple[str, ...], ...] | None, Trace | None]:
    """Train ``model`` for one step on each batch; return its outputs, layers and trace.

    Raises:
        Exception: anything that the user's functions raise.
    """
    if model is None:
        absent = dict.fromkeys(("predictions", "shown", "losses"), _NO_MODEL)
        return Outputs(None, None, None, absent), None, None
    parts: Mapping[str, Callable[..., Any]] = {
        "make_optimizer": _sgd,
        "forward": _forward,
        "loss": _loss,
        **config.functions,
    }
    forward, compute_loss = parts["forward"], parts["loss"]
    optimizer = parts["make_optimizer"](model.parameters())
    trace = HashDebugTrace(model=model, settings=settings, tracer=tracer)
    layers: list[tuple[str, ...]] = []
    losses: list[str] = []
    first = Outputs(None, None, None)
    for step, batch in enumerate(batches):
        batch = _on_device_of(model, batch)
        with untraced():
            trace.register_inputs({f"step{step}": batch})
        trace.iteration = step
        with trace:
            with _inspected(model, layers) if step == 0 else contextlib.nullcontext():
                output = forward(model, batch)
            if step == 0:
                first = _outputs(output)
            loss = compute_loss(output, batch) if optimizer is not None or "loss" in config.functions else None
            if loss is not None and optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with contextlib.suppress(NotComparableError):  # said in the outputs' own file
            for name, value in flatten(output, f"output.{step}"):
                trace.add_result(name, value)
        if loss is not None:
            losses.append(repr(float(loss.detach())))
            trace.add_result(f"loss.{step}", loss.detach())
    for name, value in state_results(model, optimizer):
        trace.add_result(name, value)
    why = {} if losses else {"losses": "the model has no parameter that learns, and the pipeline no loss"}
    outputs = replace(first, losses=tuple(losses) or None, absent={**first.absent, **why})
    return outputs, tuple(layers), trace.finish()


def _outputs(first: Any) -> Outputs:
    """Record the first outputs, before later steps can change them."""
    try:
        leaves = list(flatten(first, "output"))
    except NotComparableError as error:
        reason = f"the output cannot be hashed: {error}"
        return Outputs(None, None, None, {"predictions": reason, "shown": reason})
    with untraced():
        digests = {
            name: digest(value).word() if isinstance(value, torch.Tensor) else repr(value) for name, value in leaves
        }
        return Outputs(digests, {name: _shown(value) for name, value in leaves}, None)


def _shown(value: Any, *, most: int = 10) -> tuple[str, ...]:
    """Return the first few numbers of a tensor as text, in full precision."""
    if not isinstance(value, torch.Tensor):
        return (repr(value)[:200],)
    return tuple(repr(number) for number in value.detach().reshape(-1)[:most].cpu().tolist())


# ---------------------------------------------------------------------------------------- what the pipeline leaves out


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(learning, lr=0.01) if learning else None


def _forward(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (list, tuple)) else model(batch)


def _loss(output: Any, batch: Any) -> torch.Tensor:
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
    """Move the tensors of a batch to the model's device; on the CPU return the batch itself."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return batch if device.type == "cpu" else map_tensors(batch, lambda tensor: tensor.to(device))


# ------------------------------------------------------------------------------------------------- the layers


@contextlib.contextmanager
def _inspected(model: torch.nn.Module, rows: list[tuple[str, ...]]) -> Iterator[None]:
    """Record every module's outputs, as rows of ``observed.LAYER_COLUMNS``, in the order in which modules return."""
    calls: dict[str, int] = {}

    def note(name: str, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        with untraced():
            for path, tensor in named_tensors(output):
                rows.append((name, type(module).__name__, str(number), path, *_statistics(tensor)))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(note, name)))
        yield


def _statistics(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return shape, dtype, mean, standard deviation, minimum, maximum and digest as text; empty where undefined."""
    shape, dtype = "x".join(map(str, tensor.shape)), dtype_name(tensor.dtype)
    numbers = [""] * 4
    if tensor.layout is torch.strided and tensor.numel() and not tensor.is_complex() and not tensor.is_quantized:
        values = tensor.detach().double()
        statistics = (values.mean(), values.std(correction=0), values.min(), values.max())
        numbers = [repr(float(number)) for number in statistics]
    return shape, dtype, *numbers, digest(tensor.detach()).value


# ------------------------------------------------------------------------------------------------ as a process


def main() -> NoReturn:
    """Read the task, one line, from standard input, run it, and write its files and an answer."""
    task: Mapping[str, Any] = json.loads(sys.stdin.readline())
    end_with_input()
    folder = Path(task["folder"])
    answer: dict[str, Any] = {"error": None}
    try:
        sys.path[:] = task["path"]
        seen = observe(Path(task["config"]), **task["asked"])
        observed.write_run(seen, folder)
    except HashbenchError as error:
        answer["error"] = {"what": error.what, "consequence": error.consequence, "tip": error.tip}
    except BaseException as error:
        traceback.print_exc()
        answer["error"] = {"what": "the pipeline ended its process", "consequence": named_line(error), "tip": ""}
    replace_file(folder / ANSWER_FILE, json.dumps(answer))
    exit_at_once()  # whatever the pipeline has started must not keep the answer waiting
