"""One model in the stand-in: both words, what is judged, batch invariance, fingerprints, time limits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hashbench.core.diagnose import repro
from hashbench.core.records import BATCH_INVARIANCE
from hashbench.core.run import outcome
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.checking import check
from hashbench.extensions.fingerprint.verify import SAME
from hashbench.integrations.dynamo import eager_runs, model_check
from hashbench.integrations.dynamo.harness import read_flags
from hashbench.integrations.dynamo.session import Note, collect, write_note
from tests.flat_rows import flat
from tests.integrations.dynamo.dynamo_helpers import NOISY, Found, Standin, a_session
from tests.integrations.dynamo.standin_helpers import DIFFER, SKIPPED, with_us


def with_batches(standin: Standin, name: str, *flags: str, **session: Any) -> Found:
    ours = a_session(standin.folder.parent / "ours", mode=BATCH_INVARIANCE, **session)
    return standin.run(name, "--batch-invariant", *flags, session=ours)


MODELS = {
    "passes": ("doubled", "pass"),
    "differs": ("centred", "fail_batch_invariance_at_4"),
    "cannot run a part": ("half", "fail_to_run_at_batch_2"),
    "raises": ("failing", "fail_to_run"),
    "is in a list": ("huge", "pass_due_to_skip"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), MODELS.values(), ids=MODELS)
def test_row_of_the_harness_is_what_it_is_without_us(standin: Standin, name: str, status: str) -> None:
    alone = standin.run(name, "--batch-invariant").theirs
    found = with_batches(standin, name)
    volatile = {"compilation_latency": ""}
    assert found.theirs | volatile == alone | volatile
    assert found.theirs["accuracy"] == found.row.harness_accuracy == found.row.accuracy == status
    assert (found.row.mode, found.row.batch_size) == (BATCH_INVARIANCE, 8)


def test_training_is_forward_only_as_there(standin: Standin) -> None:
    found = with_batches(standin, "centred", "--training")
    assert (found.row.accuracy, found.row.mode) == ("fail_batch_invariance_at_4", BATCH_INVARIANCE)
    assert found.row.differing_results == "result"


@pytest.mark.slow
def test_other_ops_by_size_are_a_choice_by_size(standin: Standin) -> None:
    row = with_batches(standin, "routed", budget=20.0).row
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_4", "aten.mul.Tensor")
    assert (row.cause, row.confidence, flat(row).smallest_batch) == ("shape_dependent_kernel", "proven", 5), row.because
    assert with_batches(standin, "routedexactly").row.accuracy == "pass"


@pytest.mark.slow
def test_compiled_results_are_left_to_the_harness(standin: Standin) -> None:
    found = with_batches(standin, "centred", "--backend=aot_eager")
    assert found.row.accuracy == found.theirs["accuracy"] == "fail_batch_invariance_at_4"
    assert "only outputs were compared, by the harness" in found.row.error
    assert not found.row.kernel


def test_differing_model_is_no_batch_failure(standin: Standin) -> None:
    found = with_batches(standin, "noisy")
    assert found.theirs["accuracy"] == "fail_batch_invariance_at_4"
    assert found.row.accuracy == "pass_due_to_skip"
    assert "two runs of the same 8 items differ" in found.row.error
    assert "the harness wrote fail_batch_invariance_at_4" in found.row.error


def test_flags_tell_the_mode() -> None:
    assert read_flags(["--accuracy", "--batch-invariant", "--training"]).mode == BATCH_INVARIANCE


def test_a_row_that_only_the_harness_has_keeps_its_word(tmp_path: Path) -> None:
    session = a_session(tmp_path / "ours", mode=BATCH_INVARIANCE)
    session.prepare(anew=True)
    path = tmp_path / "a.csv"
    path.write_text("dev,name,batch_size,accuracy\ncpu,m,8,fail_to_run\n")
    write_note(session, Note("m", status="", csv=str(path)))
    (row,) = collect(session)
    assert (row.accuracy, row.harness_accuracy, row.batch_size) == ("fail_to_run", "fail_to_run", 8)
    assert "hashbench has not run it" in row.error


def test_kernel_survives_death_in_first_further_run(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome, "attempt", ends)
    with pytest.raises(KeyboardInterrupt):
        with_us(standin, "noisy", budget=60)
    (row,) = collect(a_session(standin.folder.parent / "ours"))
    assert (row.accuracy, row.kernel, row.module) == (DIFFER, NOISY, "Noisy.noise")
    assert row.error == "the process ended before a cause was found"


@pytest.mark.slow
def test_model_that_differs_is_explained(standin: Standin) -> None:
    row = with_us(standin, "noisy", budget=1000).row
    assert (row.accuracy, row.kernel, row.module) == ("eager_two_runs_differ", NOISY, "Noisy.noise")
    assert (row.cause, row.confidence, row.iteration) == ("rng", "proven", 1)
    ours = standin.folder.parent / "ours"
    assert re.fullmatch(r"in a fresh process [1-9]\d* of \d+ calls differ", row.reproduced)
    assert (ours / row.repro / "repro.py").is_file()
    assert all((ours / trace).is_file() for trace in row.traces.split())


WORDS = [
    # model and flags, traced, the harness's word, ours, the kernel, in our error
    ("noisy", "on-demand", DIFFER, DIFFER, NOISY, ""),
    ("listed", "always", "pass", DIFFER, NOISY, "the harness wrote pass"),
    ("exempt", "always", SKIPPED, DIFFER, NOISY, "the harness wrote pass_due_to_skip"),
    ("exempt", "on-demand", SKIPPED, DIFFER, NOISY, "the harness wrote pass_due_to_skip"),
    ("odd", "always", DIFFER, "results_not_comparable", "", "bit by bit the two runs agree"),
    ("odd", "on-demand", DIFFER, "results_not_comparable", "", "unsupported type"),
    ("stranger", "always", DIFFER, "results_not_comparable", "", "bit by bit the two runs agree"),
    ("alien", "always", DIFFER, "results_not_comparable", "", "the recorded ops of the two runs agree"),
    ("noisyalien", "always", DIFFER, "results_not_comparable", NOISY, "the recorded ops of the two runs do not agree"),
    ("stranger", "on-demand", DIFFER, "results_not_comparable", "", "nothing of the two runs was recorded"),
    ("noisystranger", "always", DIFFER, DIFFER, NOISY, ""),
    ("noisystranger", "on-demand", DIFFER, DIFFER, NOISY, ""),
    ("notnumbers --float32", "always", DIFFER, "pass", "", "same() of the harness said no"),
    ("failing", "always", "eager_1st_run_fail", "eager_1st_run_fail", "", "ValueError: no such luck"),
    ("refused", "always", "eager_fail_to_run", "eager_fail_to_run", "", "does not have a deterministic implementation"),
    ("huge", "always", SKIPPED, SKIPPED, "", "the harness ran no eager pair"),
]


@pytest.mark.parametrize(("model", "traced", "theirs", "ours", "kernel", "said"), WORDS)
def test_word_of_the_harness_and_ours(
    standin: Standin, model: str, traced: str, theirs: str, ours: str, kernel: str, said: str
) -> None:
    name, *flags = model.split()
    found = with_us(standin, name, *flags, trace=traced)
    assert found.ours is not None
    assert (found.theirs["accuracy"], found.ours.harness_accuracy) == (theirs, theirs)
    assert (found.row.accuracy, found.row.kernel) == (ours, kernel)
    assert said in found.row.error
    assert ("bit by bit" in found.row.error) == said.startswith("bit by bit")
    assert ("put_" in found.row.nondeterministic_op) == (name == "refused")


def test_file_model_is_named_by_its_class(standin: Standin) -> None:
    file = standin.folder.parent / "net.py"
    file.write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n\n"
        "    def get_example_inputs(self):\n        return [torch.ones(2, 4)]\n"
    )
    found = standin.run("net", session=a_session(standin.folder.parent / "ours"), only=f"path:{file},class:Net")
    assert (found.theirs["name"], found.row.name, found.row.accuracy) == ("Net", "Net", "pass")


def test_sign_of_zero_differs_only_here(standin: Standin) -> None:
    found = with_us(standin, "signs")
    assert found.theirs["accuracy"] == "pass"
    assert (found.row.accuracy, found.row.representation) == (DIFFER, "sign of zero")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--accuracy",), ("--accuracy", "--only=noisy")])
@pytest.mark.parametrize("age", [10.0, 1990.0])
def test_diagnosis_needs_time_before_the_timeout(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], age: float
) -> None:
    """A check that took long, of runs that did not: of loading, casting and copying."""
    session = replace(a_session(standin.folder.parent / "ours", budget=0.001), arguments=arguments)
    monkeypatch.setattr(repro, "run_in_fresh_process", lambda *_, **__: "not run here")
    monkeypatch.setattr(model_check, "_age", lambda: age)
    for module, seconds in ((model_check, 200), (eager_runs, 1)):
        clock = itertools.count(step=seconds)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.__next__))
    row = standin.run("noisy", session=session).row
    in_time = age < 100 or len(arguments) > 1
    assert row.confirmed == ("yes" if in_time else "not tried: the harness's --timeout is too near")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [("steady", ["--training"]), ("noisy", []), ("failing", [])])
def test_fingerprints_are_beside_the_rows(standin: Standin, tmp_path: Path, name: str, flags: list[str]) -> None:
    mode = "training" if flags else "inference"
    ours = a_session(tmp_path / "ours", mode=mode, fingerprints=True)
    alone = standin.run(name, *flags).theirs
    found = standin.run(name, *flags, session=ours)
    path = document.path_in(tmp_path / "ours", (found.row.suite, name, mode))

    assert found.theirs["accuracy"] == alone["accuracy"]
    assert path.exists() == (name != "failing")
    if path.exists():
        recorded = document.read(path)
        (model,) = recorded.models
        assert model.key[:4] == (found.row.suite, name, mode, "cpu")
        assert {kernel.phase for kernel in model.kernels} == ({"forward", "backward"} if flags else {"forward"})
        assert {checked.status for checked in check(recorded)} == {SAME}
        assert "torch" in recorded.environment["packages"]  # type: ignore[operator]


def test_no_time_left_no_fingerprint(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check.HarnessModel, "seconds_left", lambda _: 0.0)
    found = standin.run("steady", session=a_session(tmp_path / "ours", fingerprints=True))

    assert found.row.accuracy == "pass"
    assert "no kernel fingerprint: the harness's --timeout is too near" in found.row.error
    assert not (tmp_path / "ours" / document.FOLDER).exists()


@pytest.mark.slow
def test_passing_model_is_stressed(standin: Standin) -> None:
    found = with_us(standin, "collected", stress=True)
    assert (found.theirs["accuracy"], found.row.accuracy, flat(found.row).latent) == ("pass", "pass", "collector")
    assert flat(found.row).latent_kernel == "aten.mul.Tensor"
    assert "process" in flat(found.row).stressed
