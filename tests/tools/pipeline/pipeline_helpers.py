"""Checks for tests: what a check saw, written by hand (two batches of two samples from two workers, equal unless a test
changes it), and real runs in processes of their own, forked from two interpreters that have torch loaded and differ in
their ``PYTHONHASHSEED`` (a new interpreter takes four seconds)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hashbench.core.errors import HashbenchError
from hashbench.core.finding import as_text
from hashbench.core.records import OpRecord, Result, TensorDigest, Trace
from hashbench.tools.pipeline.comparing import PipelineVerdict, compare, finding_of
from hashbench.tools.pipeline.observed import (
    MOMENTS,
    BatchRecord,
    BatchRecords,
    CheckRecord,
    Folder,
    Listing,
    Loader,
    LoaderWorker,
    Observed,
    Outputs,
    RandomState,
    RepeatResult,
    Sample,
    Surroundings,
    Transform,
    TransformStep,
    Weights,
)

PIPELINES = Path(__file__).parent / "pipelines"
HASH_SEEDS = ("1", "2")


def write_config(folder: Path, fault: str, twin: str, images: Path, *, more: str = "", steps: int = 2) -> Path:
    """A pipeline of one specimen: ``broken`` or ``repaired``, on the images in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fault}_{twin}.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(PIPELINES)!r})\n"
        f"import common\nimport {fault} as fault\nsteps = {steps}\n"
        f"def make_loader(seed):\n    return fault.{twin}(seed, {str(images)!r})\n"
        f"make_model = getattr(fault, 'make_model', common.make_model)\n{more}\n",
        encoding="utf-8",
    )
    return path


FILES = ("a.png", "b.png", "c.png", "d.png")
GENERATORS = {"python": "p0", "numpy": "n0", "torch": "t0"}


def sample(place: int, **changes: Any) -> Sample:
    """The sample at ``place`` of the listing; its one transform drew nothing."""
    plain = Sample(
        index=str(place),
        files=(FILES[place],),
        file_digests=(f"bytes of {FILES[place]}",),
        before=f"before {place}",
        after=f"after {place}",
        steps=(TransformStep("dataset.transform Flip", f"after {place}", ()),),
        generators=GENERATORS,
    )
    return replace(plain, **changes)


def batches(*samples: Sample, **changes: Any) -> BatchRecords:
    """Batches of two samples each; the digest of each says what is in it."""
    pairs = [samples[place : place + 2] for place in range(0, len(samples), 2)]
    made = tuple(
        BatchRecord(number, " ".join(str(item.after) for item in pair), number % 2, pair)
        for number, pair in enumerate(pairs)
    )
    return replace(BatchRecords(made, asked_for=2, exhausted=True), **changes)


def trace(output: str = "o0") -> Trace:
    """One op, and its output as the result."""
    digest = TensorDigest("float32", (2,), (1,), output)
    op = OpRecord("forward.0/model/aten.relu.default#0", "forward", 0, "model", "aten.relu.default", outputs=(digest,))
    return Trace((op,), results=(Result("output.0", digest, op.id),))


def loader(**changes: Any) -> Loader:
    plain = Loader(
        kind="torch.utils.data.dataloader.DataLoader",
        dataset="user.Images",
        length=4,
        batch_size=2,
        num_workers=2,
        shuffle=False,
        sampler="torch.utils.data.sampler.SequentialSampler",
        batch_sampler="torch.utils.data.sampler.BatchSampler",
        draws_by_default=False,
        generators={},
        seed=1,
        worker_init_fn=None,
        collate_fn="torch.utils.data._utils.collate.default_collate",
        start_method="fork",
        persistent_workers=False,
        drop_last=False,
        pin_memory=False,
        transforms=(Transform("dataset.transform Flip", "Flip()", 4, ()),),
        random_transforms=(),
        listing=Listing("dataset.files", "/images", FILES),
        folders=(Folder(".", 4, "order", "set"),),
    )
    return replace(plain, **changes)


def seen(**changes: Any) -> Observed:
    """A whole pipeline that repeats."""
    workers = tuple(LoaderWorker(number, GENERATORS, GENERATORS) for number in (0, 1))
    plain = Observed(
        surroundings=Surroundings({"python": "3.11"}, {"num_threads": "1"}, "5", "user", ("training",)),
        random_state=RandomState(dict.fromkeys(MOMENTS, GENERATORS), workers),
        loader=loader(),
        batches=batches(*map(sample, range(4))),
        weights=Weights({"weight": "float32[2]:w0"}, {}),
        outputs=Outputs({"output": "float32[2]:o0"}, {"output": ("0.5",)}, ("0.25",)),
        layers=(("model", "ReLU", "0", "", "2", "float32", "0.5", "0.0", "0.5", "0.5", "o0"),),
        trace=trace(),
    )
    return replace(plain, **changes)


def check(
    observed: Observed | None = None, *, repetition: RepeatResult | None = None, name: str = "check"
) -> CheckRecord:
    return CheckRecord(name, observed or seen(), repetition)


def compared(second: Observed, first: Observed | None = None) -> PipelineVerdict:
    return compare(check(first), check(second))


def said(verdict: PipelineVerdict) -> str:
    return as_text(finding_of(verdict, names=("a", "b"), folders=(Path("a"), Path("b"))), width=1000)


def statuses(verdict: PipelineVerdict) -> dict[str, str]:
    return {stage.name: stage.status for stage in verdict.stages}


def in_another_order() -> BatchRecords:
    return batches(*(sample(place) for place in (2, 0, 3, 1)))


def whole(*digests: str | None, **changes: Any) -> Observed:
    """What a loader that is no ``DataLoader`` shows: whole batches."""
    made = BatchRecords(tuple(BatchRecord(number, digest) for number, digest in enumerate(digests)), 2, False)
    return seen(loader=loader(listing=None, absent={"loader": "no DataLoader"}), batches=made, **changes)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Zygotes:
    """In the place of ``checking.run_once``: forks each run from the interpreter with the wanted hash seed."""

    def __init__(self) -> None:
        self._processes = {hash_seed: self._started(hash_seed) for hash_seed in HASH_SEEDS}

    def run(self, config: Path, folder: Path, asked: Mapping[str, str], *, timeout: float, log: Path) -> None:  # noqa: ARG002 – as run_once has it
        log.touch()
        task = {"config": str(config), "folder": str(folder), "asked": dict(asked), "log": str(log)}
        process = self._processes[asked["hash_seed"]]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        error = json.loads(process.stdout.readline())
        if error:
            raise HashbenchError(error)

    def _started(self, hash_seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()


def main() -> None:
    import torchvision  # noqa: F401 – what every child needs

    from hashbench.tools.pipeline import running  # noqa: F401

    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _child(task, writing)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as answer:
            error = answer.read()
        os.waitpid(child, 0)
        print(json.dumps(error), flush=True)


def _child(task: dict[str, Any], answer: int) -> None:
    import numpy as np
    import torch

    from hashbench.tools.pipeline import observed, running

    os.setsid()
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    random.seed()  # as a new interpreter would be
    np.random.seed()
    torch.seed()
    try:
        seen = running.observe(Path(task["config"]), **task["asked"])
        observed.write_run(seen, Path(task["folder"]))
    except BaseException as error:
        traceback.print_exc()
        os.write(answer, (str(error) or repr(error)).encode())
    os.killpg(0, signal.SIGKILL)  # with its workers, which hold the pipe open


if __name__ == "__main__":
    main()
