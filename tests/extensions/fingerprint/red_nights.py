"""Nights in which models got worse, planted: rows, environments, digests of files and fingerprints of two nights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hashbench.core.records import Row
from hashbench.core.report.reasons import Reason
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.document import VARIES, Fingerprints, ModelFingerprint
from tests.core.report.rows import DIFFER, PLAIN, selection, write_sweep
from tests.extensions.fingerprint.fingerprints import MM, NET
from tests.flat_rows import changed

CONVOLUTION, INDEX_PUT = "aten.convolution.default", "aten.index_put_.default"


def passes(name: str, suite: str = "zoo", **values: Any) -> Row:
    return changed(PLAIN, name=name, suite=suite, env="before", **values)


def differs(name: str, kernel: str = "aten.mm.default", *, differing: int = 20, trials: int = 20, **values: Any) -> Row:
    """A model whose runs differ in so many of so many replays."""
    place = {"origin": "kernel", "kernel": kernel, "module": "Net.layer", "source": "races.py:27 forward"}
    often = {"rate": differing / trials, "trials": trials, "rate_of": "replays"}
    return replace(passes(name, **{**place, **often, **values}), accuracy=values.get("accuracy", DIFFER), env="now")


def fails(name: str, accuracy: str, error: str, **values: Any) -> Row:
    return replace(passes(name, **values), accuracy=accuracy, error=error, env="now")


def recording(*changed_ops: str, varies: tuple[str, ...] = ()) -> ModelFingerprint:
    """The kernels of a model, of which some have other outputs than usual, and some other ones when repeated."""
    ops = ("aten.mm.default", CONVOLUTION, INDEX_PUT, "aten.silu.default")
    kernels = [replace(MM, op=op, outputs=("float32[2,4]:cc",) if op in changed_ops else MM.outputs) for op in ops]
    left_out = {VARIES: dict.fromkeys(varies, 1)} if varies else {}
    return replace(NET, kernels=tuple(kernel for kernel in kernels if kernel.op not in varies), left_out=left_out)


@dataclass(frozen=True)
class Side:
    """One night: its rows, machine, the digest of the file of every suite, and the recordings of models.

    ``None``: nothing was recorded of it.
    """

    rows: tuple[Row, ...]
    machine: Mapping[str, Any] | None = field(default_factory=lambda: {"packages": {"torch": "2.14.0"}})
    file: str | None = "as it was"
    kernels: Mapping[str, ModelFingerprint] = field(default_factory=dict)

    def write(self, folder: Path, key: str) -> Path:
        """Write it as a night leaves it: a folder of one sweep for each suite."""
        for suite in dict.fromkeys(row.suite for row in self.rows):
            rows = [row for row in self.rows if row.suite == suite]
            asked = None if self.file is None else {**selection(*rows), "digests": {suite: self.file}}
            machine = None if self.machine is None else {"schema": 1, "key": key, **self.machine}
            at = write_sweep(folder / f"{suite}_training", *rows, environment=machine, selection=asked)
            for row in rows:
                if row.name in self.kernels:
                    model = replace(self.kernels[row.name], name=row.name, suite=suite, mode=row.mode)
                    path = document.path_in(at, model.key)
                    document.write(path, Fingerprints(self.machine or {}, (model,)))
        return folder


@dataclass(frozen=True)
class Night:
    """Two nights, the second of which is red, and what its sentence must say: of each model the reason."""

    before: Side
    now: Side
    reasons: Mapping[str, Reason]
    said: tuple[str, ...] = ()

    def write(self, root: Path) -> tuple[Path, Path]:
        return self.before.write(root / "2026-11-19", "before"), self.now.write(root / "2026-11-20", "now")


TORCH_215 = {"packages": {"torch": "2.15.0"}}
BUSY = {"packages": {"torch": "2.14.0"}, "threads": {"intra_op": 8}, "cpu": {"model": "B"}}
RECORDED = {"a": recording(), "b": recording()}

PLANTED = {
    "library: with torch 2.15 a kernel varies": Night(
        Side((passes("a"), passes("b")), kernels=RECORDED),
        Side(
            (differs("a", CONVOLUTION), replace(passes("b"), env="now")),
            machine=TORCH_215,
            kernels={"a": recording(varies=(CONVOLUTION,)), "b": recording()},
        ),
        {"a": Reason.LIBRARY},
        ("1 model got worse: a (library: torch 2.14.0 -> 2.15.0 changed aten.convolution.default)",),
    ),
    "library: with another processor and more threads a kernel computes something else": Night(
        Side((passes("a"), passes("b")), kernels=RECORDED),
        Side(
            (differs("a"), differs("b")),
            machine=BUSY,
            kernels={"a": recording("aten.mm.default"), "b": recording("aten.mm.default")},
        ),
        {"a": Reason.LIBRARY, "b": Reason.LIBRARY},
        ("2 models got worse: a, b (library: CPU none -> B, threads none -> 8 changed aten.mm.default)",),
    ),
    "flake: two of nine runs": Night(
        Side((passes("a"),)),
        Side((differs("a", INDEX_PUT, differing=2, trials=9, rate_of="runs"),)),
        {"a": Reason.FLAKE},
        (f"a (flake: 2 of 9 runs of this build, {INDEX_PUT}, races.py:27 forward)",),
    ),
    "flake: in some pairs under memory that is not cleared": Night(
        Side((passes("a", stressed="memory 0/4"),)),
        Side(
            (
                replace(
                    passes(
                        "a",
                        stressed="memory 1/4",
                        latent="memory",
                        latent_kernel=INDEX_PUT,
                        latent_rate=0.25,
                    ),
                    env="now",
                ),
            )
        ),
        {"a": Reason.FLAKE},
        (f"a (flake: 25 % of pairs under memory, {INDEX_PUT})",),
    ),
    "model: its file changed, and runs differ": Night(
        Side((passes("a"), passes("b")), kernels=RECORDED),
        Side((differs("a", INDEX_PUT), replace(passes("b"), env="now")), file="edited"),
        {"a": Reason.MODEL},
        (f"a (model: the file of zoo changed, {INDEX_PUT}, races.py:27 forward)",),
    ),
    "model: its file changed, and it raises": Night(
        Side((passes("a"),)),
        Side((fails("a", "eager_1st_run_fail", "TypeError: no x", source="zoo.py:7 forward"),), file="edited"),
        {"a": Reason.MODEL},
        ("a (model: the file of zoo changed, zoo.py:7 forward)",),
    ),
    "compiler: inaccurate with another torch": Night(
        Side((passes("a", backend="inductor"),)),
        Side(
            (differs("a", "cpp_fused_relu_0", accuracy="fail_accuracy", backend="inductor"),),
            machine=TORCH_215,
        ),
        {"a": Reason.COMPILER},
        ("a (compiler: eager runs agree, compiled code does not, cpp_fused_relu_0, races.py:27 forward)",),
    ),
    "compiler: compiled runs differ now and then": Night(
        Side((passes("a", backend="inductor"),)),
        Side(
            (
                differs(
                    *("a", "cpp_fused_sum_0"),
                    differing=3,
                    accuracy="compiled_two_runs_differ",
                    backend="inductor",
                ),
            )
        ),
        {"a": Reason.COMPILER},
    ),
    "machine: out of memory": Night(
        Side((passes("a"),)),
        Side((fails("a", "eager_1st_run_OOM", "torch.OutOfMemoryError: tried to allocate 20 GiB"),)),
        {"a": Reason.MACHINE},
        ("1 model got worse: a (harness or machine: out of memory)",),
    ),
    "machine: no disk, and no time": Night(
        Side((passes("a"), passes("b"))),
        Side(
            (
                fails("a", "eager_fail_to_run", "OSError: [Errno 28] No space left on device: 'x'"),
                fails("b", "timeout", "no result after 600 s; logs/b.log shows where it was"),
            ),
            machine=TORCH_215,
        ),
        {"a": Reason.MACHINE, "b": Reason.MACHINE},
        ("a (harness or machine: disk full)", "b (harness or machine: time limit)"),
    ),
    "mixed: torch changed a kernel of two models, a third is flaky": Night(
        Side(
            (passes("resnet50"), passes("vgg16"), passes("toy_gru")),
            kernels={"resnet50": recording(), "vgg16": recording(), "toy_gru": recording()},
        ),
        Side(
            (
                differs("resnet50", CONVOLUTION),
                differs("vgg16", CONVOLUTION),
                differs("toy_gru", INDEX_PUT, differing=2, trials=9, rate_of="runs"),
            ),
            machine=TORCH_215,
            kernels={
                "resnet50": recording(varies=(CONVOLUTION,)),
                "vgg16": recording(CONVOLUTION),
                "toy_gru": recording(varies=(INDEX_PUT,)),
            },
        ),
        {"resnet50": Reason.LIBRARY, "vgg16": Reason.LIBRARY, "toy_gru": Reason.FLAKE},
        (
            "3 models got worse: resnet50, vgg16 (library: torch 2.14.0 -> 2.15.0 changed aten.convolution.default), "
            f"toy_gru (flake: 2 of 9 runs of this build, {INDEX_PUT}, races.py:27 forward)",
        ),
    ),
    "mixed: one lacked memory, one is inaccurate, one is flaky": Night(
        Side((passes("a", "vision"), passes("b", backend="inductor"), passes("c"))),
        Side(
            (
                fails("a", "eager_2nd_run_OOM", "MemoryError", suite="vision"),
                differs("b", "cpp_fused_relu_0", accuracy="fail_accuracy", backend="inductor"),
                differs("c", INDEX_PUT, differing=7),
            )
        ),
        {"a": Reason.MACHINE, "b": Reason.COMPILER, "c": Reason.FLAKE},
        ("3 models got worse: b (compiler: ", "), a (harness or machine: out of memory), c (flake: 7 of 20 replays"),
    ),
}
"""Each reason twice and more, and two nights with several."""

UNKNOWN = {
    "torch and the file changed at once": Night(
        Side((passes("a"),), kernels=RECORDED),
        Side((differs("a"),), machine=TORCH_215, file="edited", kernels={"a": recording("aten.mm.default")}),
        {"a": Reason.UNKNOWN},
        ("a (not known: torch 2.14.0 -> 2.15.0 and the file of zoo changed at once, aten.mm.default",),
    ),
    "nothing was recorded": Night(
        Side((passes("a"),), machine=None, file=None),
        Side((differs("a"),), machine=None, file=None),
        {"a": Reason.UNKNOWN},
        ("a (not known: what changed is not recorded, aten.mm.default",),
    ),
    "nobody recorded what the file was": Night(
        Side((passes("a"),), file=None),
        Side((differs("a"),), file="edited"),
        {"a": Reason.UNKNOWN},
        ("a (not known: nothing that is recorded changed",),
    ),
    "torch changed, and nobody recorded kernels": Night(
        Side((passes("a"),)),
        Side((differs("a"),), machine=TORCH_215),
        {"a": Reason.UNKNOWN},
        ("a (not known: perhaps torch 2.14.0 -> 2.15.0, aten.mm.default",),
    ),
    "torch changed, and kernels were recorded in the night before only": Night(
        Side((passes("a"),), kernels=RECORDED),
        Side((differs("a"),), machine=TORCH_215),
        {"a": Reason.UNKNOWN},
        ("hashbench fingerprint verify",),
    ),
    "torch changed another kernel": Night(
        Side((passes("a"),), kernels=RECORDED),
        Side((differs("a"),), machine=TORCH_215, kernels={"a": recording("aten.silu.default")}),
        {"a": Reason.UNKNOWN},
        ("which did not change its kernel",),
    ),
    "nothing changed": Night(
        Side((passes("a"),), kernels=RECORDED),
        Side((differs("a"),), kernels=RECORDED),
        {"a": Reason.UNKNOWN},
        ("a (not known: nothing that is recorded changed, aten.mm.default", "--runs 60"),
    ),
    "it differs now and then, and its file changed": Night(
        Side((passes("a"),)),
        Side((differs("a", differing=2, trials=9),), file="edited"),
        {"a": Reason.UNKNOWN},
        ("a (not known: the file of zoo changed",),
    ),
    "a kernel crashes": Night(
        Side((passes("a"),)),
        Side((fails("a", "crashed", "killed by SIGSEGV | Fatal Python error"),)),
        {"a": Reason.UNKNOWN},
        ("a (not known: nothing that is recorded changed, killed by SIGSEGV",),
    ),
    "it raises with another torch": Night(
        Side((passes("a"),)),
        Side((fails("a", "eager_1st_run_fail", "AttributeError: no such op"),), machine=TORCH_215),
        {"a": Reason.UNKNOWN},
        ("a (not known: perhaps torch 2.14.0 -> 2.15.0, AttributeError: no such op)",),
    ),
    "out of memory, and its file changed": Night(
        Side((passes("a"),)),
        Side((fails("a", "eager_1st_run_OOM", "MemoryError"),), file="edited"),
        {"a": Reason.UNKNOWN},
        ("a (not known: out of memory and the file of zoo changed at once",),
    ),
    "another batch": Night(
        Side((passes("a"),)),
        Side((differs("a", batch_size=8),)),
        {"a": Reason.UNKNOWN},
        ("Whether a got worse is not known: batch_size 4 → 8",),
    ),
}
"""Nights of which no reason can be known."""
