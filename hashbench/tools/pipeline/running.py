"""One run of a pipeline, in the process that was made for it: everything seen, as files in a folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from hashbench.errors import HashbenchError, named_line
from hashbench.io import PACKAGE_PARENT, replace_file
from hashbench.processes import end_with_input, exit_at_once
from hashbench.run.environment import collect
from hashbench.run.rng import global_state_digests
from hashbench.run.settings import settings
from hashbench.tools.pipeline import checkfolder
from hashbench.tools.pipeline.config import Config, load
from hashbench.tools.pipeline.launching import ANSWER_FILE
from hashbench.tools.pipeline.loading import FolderWatch, facts_of, first_batches, given_generators
from hashbench.tools.pipeline.observed import Batch, Batches, Digests, Observed, RandomState, Sample, Surroundings
from hashbench.tools.pipeline.training import first_steps, weights_of

_PACKAGES = (
    *("pillow", "opencv-python", "opencv-python-headless", "albumentations", "kornia", "datasets", "webdataset"),
    *("h5py", "lmdb", "pyarrow", "pandas", "scikit-image", "scipy", "torchaudio", "torchcodec"),
)


def observe(path: Path, *, hash_seed: str, hash_seed_by: str) -> Observed:
    """Run the pipeline of a configuration and say what was seen. Seeds nothing by itself.

    Raises:
        HashbenchError: the configuration cannot be used, or one of its functions failed; with its words.
    """
    run = _Run()
    run.note("start")
    known = set(sys.modules)
    with FolderWatch() as listed:
        with _part_named(path, "its import"):
            config = load(path)
        modules = _modules_of_users(known)
        run.note("imported")
        _seed(path, config)
        run.note("seeded")
        with _part_named(path, "make_loader"):
            loader = config.functions["make_loader"](config.seed)
        _check_loader(path, loader)
        run.note("loader made")
    model = _model(path, config)
    run.note("model made")
    given = given_generators(loader)
    weights = weights_of(model)
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder, _part_named(path, "its loader"):
        made = first_batches(loader, steps=config.steps, folder=Path(folder), modules=modules, note=run.note)
    if not made.batches:
        raise HashbenchError(
            f"the loader of {path} is empty",
            consequence="it gave no batch, so nothing can be compared",
            tip="Check its dataset, and drop_last.",
        )
    facts = facts_of(loader, seed=config.seed, folders=(), batches=made.seen, given=given)
    root = facts.listing.root if facts.listing is not None else _common_root(made.seen.batches)
    with _part_named(path, "its model"):
        trained = first_steps(config, model, made.batches)
    return Observed(
        surroundings=_surroundings(model, hash_seed, hash_seed_by, _modules_of_users(known)),
        random_state=RandomState(run.moments, made.workers),
        loader=replace(facts, folders=listed.folders(root)),
        batches=_relative(made.seen, root),
        weights=weights,
        outputs=trained.outputs,
        layers=trained.layers,
        trace=trained.trace,
    )


@dataclass
class _Run:
    moments: dict[str, Digests] = field(default_factory=dict)

    def note(self, moment: str) -> None:
        self.moments[moment] = global_state_digests()


@contextlib.contextmanager
def _part_named(path: Path, part: str) -> Iterator[None]:
    """What the user's own code raises is the user's: said in its words, with the whole traceback printed."""
    try:
        yield
    except HashbenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        consequence = f"{part} raised {named_line(error)}; nothing was compared"
        raise HashbenchError(f"cannot run the pipeline {path}", consequence=consequence) from error


def _seed(path: Path, config: Config) -> None:
    function = config.part("set_seed")
    if function is not None:
        with _part_named(path, "set_seed"):
            function(config.seed)


def _model(path: Path, config: Config) -> torch.nn.Module | None:
    make = config.part("make_model")
    if make is None:
        return None
    with _part_named(path, "make_model"):
        model = make()
    if not isinstance(model, torch.nn.Module):
        raise HashbenchError(
            f"make_model of {path} returned a {type(model).__name__}",
            consequence="nothing was compared",
            tip="Return a torch.nn.Module.",
        )
    return model


def _check_loader(path: Path, loader: Any) -> None:
    if not hasattr(loader, "__iter__"):
        raise HashbenchError(
            f"make_loader of {path} returned a {type(loader).__name__}",
            consequence="it gives no batches, so nothing was compared",
            tip="Return a torch.utils.data.DataLoader, or anything else that yields batches.",
        )


# ------------------------------------------------------------------------------------------------ surroundings


def _surroundings(
    model: torch.nn.Module | None, hash_seed: str, hash_seed_by: str, imports: tuple[str, ...]
) -> Surroundings:
    parameter = next(model.parameters(), None) if model is not None else None
    machine = collect("cpu" if parameter is None else parameter.device.type)
    if hash_seed_by == "hashbench":
        machine["variables"].pop("PYTHONHASHSEED", None)
    machine["packages"] |= _versions()
    return Surroundings(machine, settings(), hash_seed, hash_seed_by, imports)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _modules_of_users(known: set[str]) -> tuple[str, ...]:
    """The user's own modules that were imported since, in the order of their import: files outside Python's and the
    packages' folders."""
    packages = Path(torch.__file__).parents[1]
    python = (sys.prefix, sys.base_prefix, Path(os.__file__).parent, packages, PACKAGE_PARENT + "/hashbench")
    foreign = tuple(os.path.realpath(folder) + os.sep for folder in python)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in known and isinstance(file, str) and "site-packages" not in file:
            found += [] if os.path.realpath(file).startswith(foreign) else [name]
    return tuple(found)


def _common_root(batches: tuple[Batch, ...]) -> str:
    files = [file for batch in batches for sample in batch.samples or () for file in sample.files or ()]
    return os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""  # noqa: PTH120


def _relative(seen: Batches, root: str) -> Batches:
    """The batches with names of files from ``root`` on, so that another machine may have them elsewhere."""

    def changed(sample: Sample) -> Sample:
        if sample.files is None or not root:
            return sample
        return replace(sample, files=tuple(os.path.relpath(file, root) for file in sample.files))

    batches = tuple(
        replace(batch, samples=None if batch.samples is None else tuple(map(changed, batch.samples)))
        for batch in seen.batches
    )
    return replace(seen, batches=batches)


# ------------------------------------------------------------------------------------------------ as a process


def main() -> NoReturn:
    """What a fresh process does: one line from its standard input says what, its files and an answer are left."""
    task: Mapping[str, Any] = json.loads(sys.stdin.readline())
    end_with_input()
    place = Path(task["folder"])
    try:
        sys.path[:] = task["path"]
        seen = observe(Path(task["config"]), hash_seed=task["hash_seed"], hash_seed_by=task["hash_seed_by"])
        checkfolder.write_run(seen, place)
        answer: dict[str, Any] = {"error": None}
    except HashbenchError as error:
        answer = {"error": {"what": error.what, "consequence": error.consequence, "tip": error.tip}}
    except BaseException as error:
        traceback.print_exc()
        words = {"what": "the pipeline ended its process", "consequence": named_line(error), "tip": ""}
        answer = {"error": words}
    replace_file(place / ANSWER_FILE, json.dumps(answer))
    exit_at_once()  # whatever the pipeline has started must not keep the answer waiting
