"""One run of a pipeline, in the process that was made for it: everything seen, as files in a folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from hashbench.tools.pipeline.anatomy import common_folder
from hashbench.tools.pipeline.checking import ANSWER_FILE
from hashbench.tools.pipeline.config import Config, load
from hashbench.tools.pipeline.loading import FolderWatch, facts_of, first_batches, given_generators
from hashbench.tools.pipeline.observed import Batches, Digests, Observed, RandomState, Sample, Surroundings
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
    moments: dict[str, Digests] = {}

    def note(moment: str) -> None:
        moments[moment] = global_state_digests()

    note("start")
    known = set(sys.modules)
    with FolderWatch() as listed:
        with _part_named(path, "its import"):
            config = load(path)
        modules = _modules_of_users(known)
        note("imported")
        set_seed = config.part("set_seed")
        if set_seed is not None:
            with _part_named(path, "set_seed"):
                set_seed(config.seed)
        note("seeded")
        with _part_named(path, "make_loader"):
            loader = config.functions["make_loader"](config.seed)
        if not hasattr(loader, "__iter__"):
            consequence = "it gives no batches, so nothing was compared"
            tip = "Return a torch.utils.data.DataLoader, or anything else that yields batches."
            raise _wrong_kind(path, "make_loader", loader, consequence, tip)
        note("loader made")
    model = _model(path, config)
    note("model made")
    given = given_generators(loader)
    weights = weights_of(model)
    with _part_named(path, "its loader"):
        made = first_batches(loader, steps=config.steps, modules=modules, note=note)
    if not made.batches:
        raise HashbenchError(
            f"the loader of {path} is empty",
            consequence="it gave no batch, so nothing can be compared",
            tip="Check its dataset, and drop_last.",
        )
    facts = facts_of(loader, seed=config.seed, folders=(), batches=made.seen, given=given)
    files = [file for batch in made.seen.batches for sample in batch.samples or () for file in sample.files or ()]
    root = facts.listing.root if facts.listing is not None else common_folder(files)
    with _part_named(path, "its model"):
        trained = first_steps(config, model, made.batches)
    parameter = next(model.parameters(), None) if model is not None else None
    machine = collect("cpu" if parameter is None else parameter.device.type)
    if hash_seed_by == "hashbench":
        machine["variables"].pop("PYTHONHASHSEED", None)
    machine["packages"] |= _versions()
    return Observed(
        surroundings=Surroundings(machine, settings(), hash_seed, hash_seed_by, _modules_of_users(known)),
        random_state=RandomState(moments, made.workers),
        loader=replace(facts, folders=listed.folders(root)),
        batches=_relative(made.seen, root),
        weights=weights,
        outputs=trained.outputs,
        layers=trained.layers,
        trace=trained.trace,
    )


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


def _model(path: Path, config: Config) -> torch.nn.Module | None:
    make = config.part("make_model")
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _modules_of_users(known: set[str]) -> tuple[str, ...]:
    """The user's own modules that were imported since, in the order of their import: files outside Python's and the
    packages' folders."""
    packages = Path(torch.__file__).parents[1]
    python = (sys.prefix, sys.base_prefix, Path(os.__file__).parent, packages, PACKAGE_PARENT + "/hashbench")
    foreign = tuple(os.path.realpath(folder) + os.sep for folder in python)
    modules = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in known and isinstance(file, str) and "site-packages" not in file:
            modules += [] if os.path.realpath(file).startswith(foreign) else [name]
    return tuple(modules)


def _relative(seen: Batches, root: str) -> Batches:
    """The batches with names of files from ``root`` on, so that another machine may have them elsewhere."""
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


# ------------------------------------------------------------------------------------------------ as a process


def main() -> NoReturn:
    """What a fresh process does: one line from its standard input says what, its files and an answer are left."""
    task: Mapping[str, Any] = json.loads(sys.stdin.readline())
    end_with_input()
    folder = Path(task["folder"])
    answer: dict[str, Any] = {"error": None}
    try:
        sys.path[:] = task["path"]
        seen = observe(Path(task["config"]), hash_seed=task["hash_seed"], hash_seed_by=task["hash_seed_by"])
        checkfolder.write_run(seen, folder)
    except HashbenchError as error:
        answer["error"] = {"what": error.what, "consequence": error.consequence, "tip": error.tip}
    except BaseException as error:
        traceback.print_exc()
        answer["error"] = {"what": "the pipeline ended its process", "consequence": named_line(error), "tip": ""}
    replace_file(folder / ANSWER_FILE, json.dumps(answer))
    exit_at_once()  # whatever the pipeline has started must not keep the answer waiting
