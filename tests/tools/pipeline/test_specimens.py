"""One small real pipeline, broken in every way that the documentation names, and its repaired twins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.tools.pipeline import checking, observed
from hashbench.tools.pipeline.comparing import PipelineVerdict, compare
from tests.tools.pipeline.pipeline_helpers import HASH_SEEDS, PIPELINES, Zygotes, write_config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipelines")]


@pytest.fixture(scope="module")
def zygotes() -> Iterator[Zygotes]:
    made = Zygotes()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, zygotes: Zygotes) -> None:
    monkeypatch.setattr(checking, "run_once", zygotes.run)
    monkeypatch.setattr(checking, "_two_hash_seeds", lambda: HASH_SEEDS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sys

    sys.path.insert(0, str(PIPELINES))
    try:
        from common import draw_images
    finally:
        sys.path.remove(str(PIPELINES))
        sys.modules.pop("common", None)
    return draw_images(tmp_path_factory.mktemp("drawn") / "images")


def checked(folder: Path, fault: str, twin: str, images: Path, more: str = "") -> PipelineVerdict:
    config = write_config(folder, fault, twin, images, more=more)
    verdict = checking.check(config, folder / f"check_{twin}", timeout=60)
    assert verdict is not None
    return verdict


KERNEL = {
    "broken": "make_model = lambda: fault.With(fault.unsteady)",
    "repaired": "make_model = lambda: fault.With(fault.steady)",
}
BROKEN = {
    "unseeded_shuffle": ("order", "unseeded_shuffle", "proven"),
    "batches_by_hand": ("order", "unseeded_shuffle", "likely"),
    "random_transform": ("after transform", "random_transform", "proven"),
    "worker_seeds": ("after transform", "worker_seeds", "proven"),
    "set_order": ("order", "set_order", "proven"),
    "hash_seed": ("after transform", "string_hash", "likely"),
    "import_order": ("after transform", "import_order", "proven"),
    "random_dataset": ("after transform", "random_dataset", "proven"),
    "model_initialisation": ("initial weights", "initial_state", "proven"),
    "kernel": ("first output", "unknown", "open"),
}


def test_a_loader_that_seeds_torch_in_between_is_named(images: Path, tmp_path: Path) -> None:
    seeding = "set_seed = fault.set_seed"
    broken, repaired = (checked(tmp_path, "seeded_inside", twin, images, seeding) for twin in ("broken", "repaired"))
    (reason,) = broken.findings[0].reasons
    assert (broken.first, reason.cause) == ("after transform", "reseeded"), reason.because
    assert "batch 0" in reason.because
    assert repaired.repeats, repaired.stages


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_is_named_and_its_repaired_twin_repeats(fault: str, images: Path, tmp_path: Path) -> None:
    more = KERNEL if fault == "kernel" else {"broken": "", "repaired": ""}

    broken = checked(tmp_path, fault, "broken", images, more["broken"])
    repaired = checked(tmp_path, fault, "repaired", images, more["repaired"])

    reason = broken.findings[0].reasons[0]
    assert (broken.first, reason.cause, reason.confidence) == BROKEN[fault], reason.because
    assert repaired.repeats, repaired.stages
    assert {stage.status for stage in repaired.stages} == {"equal"}


WHOLE = {
    "list": ("after transform", "unseeded_loader", "likely", "make_loader drew from torch, which"),
    "generator": ("after transform", "unseeded_loader", "likely", "the loader drew from python, which"),
    "class": ("order", "unseeded_shuffle", "likely", "the loader drew from loader.rng, which"),
    "indexed": ("after transform", "unseeded_loader", "likely", "the loader drew from numpy, which"),
    "stream": ("after transform", "random_dataset", "proven", "the dataset drew from python, which"),
    "collate": ("after transform", "random_transform", "proven", "collate_fn drew from numpy, which"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_batches_are_compared_whatever_kind_of_loader_gives_them(kind: str, images: Path, tmp_path: Path) -> None:
    more = "steps = 10" if kind == "class" else ""  # all of them, so that their order is seen

    broken = checked(tmp_path, "whole_batches", f"broken_{kind}", images, more)
    repaired = checked(tmp_path, "whole_batches", f"repaired_{kind}", images, more)

    reason = broken.findings[0].reasons[0]
    assert (broken.first, reason.cause, reason.confidence) == WHOLE[kind][:3], reason.because
    assert WHOLE[kind][3] in reason.because
    stages = {stage.name: stage for stage in broken.stages}
    if stages["order"].status == "unseen":
        assert "whether by their order or by their content was not seen" in stages["after transform"].detail
    assert [finding.stage for finding in broken.findings] == [broken.first]
    assert stages["kernel"].status == "follows"
    assert repaired.repeats, repaired.stages
    by_status = {stage.name: stage.status for stage in repaired.stages}
    assert by_status["order"] == by_status["after transform"] == by_status["kernel"] == "equal"


def test_a_loader_that_fills_the_same_memory_again_trains_the_model_on_every_batch(
    images: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, "whole_batches", "repaired_indexed", images)
    checking.check(config, tmp_path / "check", timeout=60, repeat=False)
    trace = observed.read(tmp_path / "check").seen.trace
    assert trace is not None
    pictures = {leaf.digest.value for leaf in trace.leaves if leaf.id in ("input/step0.0", "input/step1.0")}
    assert len(pictures) == 2


SEEDED = "from spans import set_seed"
SPANS = {
    "model": (
        (f"{SEEDED}\nmake_model = fault.model_at_import", "plain"),
        (f"{SEEDED}\nmake_model = fault.model_after_seeding", "plain"),
        (
            "initial weights",
            "initial_state",
            "likely",
            "the import of the pipeline's file drew from python and torch",
        ),
    ),
    "model, seeded nowhere": (
        ("make_model = fault.model_after_seeding", "plain"),
        (f"{SEEDED}\nmake_model = fault.model_after_seeding", "plain"),
        ("initial weights", "initial_state", "proven", "make_model drew from torch"),
    ),
    "order": (
        (SEEDED, "order_at_import"),
        (SEEDED, "order_after_seeding"),
        ("order", "unseeded_shuffle", "likely", "the import of the pipeline's file drew from python"),
    ),
    "order, seeded nowhere": (
        ("", "order_after_seeding"),
        (SEEDED, "order_after_seeding"),
        ("order", "unseeded_shuffle", "likely", "make_loader drew from python"),
    ),
    "sampler": (
        ("", "sampler_while_the_loader_is_made"),
        ("", "sampler_of_the_seed"),
        ("order", "unseeded_shuffle", "likely", "make_loader drew from python"),
    ),
    "transform": (
        (SEEDED, "transform_at_import"),
        (SEEDED, "transform_after_seeding"),
        ("after transform", "unseeded_construction", "likely", "the import of the pipeline's file drew from python"),
    ),
}


@pytest.mark.parametrize("fault", SPANS)
def test_a_reason_names_the_span_in_which_the_generator_moved(fault: str, images: Path, tmp_path: Path) -> None:
    (broken_more, broken_twin), (repaired_more, repaired_twin), expected = SPANS[fault]

    broken = checked(tmp_path / "broken", "spans", broken_twin, images, broken_more)
    repaired = checked(tmp_path / "repaired", "spans", repaired_twin, images, repaired_more)

    reason = broken.findings[0].reasons[0]
    assert (broken.first, reason.cause, reason.confidence) == expected[:3], reason.because
    assert expected[3] in reason.because
    if "at_import" in broken_more + broken_twin:  # where nothing moved, nothing was drawn
        assert "make_" not in reason.because
    assert repaired.repeats, repaired.stages


# --------------------------------------------------------------------------- two machines, each of which repeats

OTHER_SYSTEM = "import os\n_list = os.listdir\nos.listdir = lambda *folder: sorted(_list(*folder), reverse=True)\n"
"""What a system lists cannot be forced, so that another one is played: it lists in the opposite order of names."""
THIS_SYSTEM = OTHER_SYSTEM.replace(", reverse=True", "")


def on_two_machines(folder: Path, fault: str, twin: str, machines: dict[str, tuple[Path, str]]) -> PipelineVerdict:
    checks = []
    for name, (images, system) in machines.items():
        config = write_config(folder / name, fault, twin, images, more=system)
        verdict = checking.check(config, folder / name / "check", timeout=60)
        assert verdict is not None
        assert verdict.repeats
        checks.append(observed.read(folder / name / "check"))
    return compare(*checks)


@pytest.mark.parametrize("twin", ["broken", "repaired"])
def test_a_listing_that_follows_the_system_repeats_on_each_machine_but_not_on_both(
    twin: str, images: Path, tmp_path: Path
) -> None:
    machines = {"one": (images, THIS_SYSTEM), "other": (images, OTHER_SYSTEM)}

    verdict = on_two_machines(tmp_path, "unsorted_listing", twin, machines)

    if twin == "repaired":
        assert verdict.repeats
        return
    reason = verdict.findings[0].reasons[0]
    assert (verdict.first, reason.cause, reason.confidence) == ("order", "unsorted_listing", "proven")
    assert {stage.status for stage in verdict.stages[3:5]} == {"equal"}  # the same files hold the same samples


def test_a_copy_with_other_bytes_and_one_with_a_file_less_are_told_apart(images: Path, tmp_path: Path) -> None:
    copies = {name: Path(shutil.copytree(images, tmp_path / name / "images")) for name in ("changed", "smaller")}
    next(iter(sorted(copies["changed"].iterdir()))).write_bytes(sorted(images.iterdir())[1].read_bytes())
    max(copies["smaller"].iterdir()).unlink()
    checks = []
    for name, folder in {"whole": images, **copies}.items():
        config = write_config(tmp_path / name, "unsorted_listing", "repaired", folder)
        checking.check(config, tmp_path / name / "check", timeout=60, repeat=False)
        checks.append(observed.read(tmp_path / name / "check"))

    changed, smaller = compare(checks[0], checks[1]), compare(checks[0], checks[2])
    assert (changed.first, changed.findings[0].reasons[0].cause) == ("before transform", "different_content")
    assert (smaller.first, smaller.findings[0].reasons[0].cause) == ("file list", "different_files")


# --------------------------------------------------------------------------------------------- what a check saw


def test_a_check_names_files_transforms_workers_and_what_is_random(images: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, "random_transform", "repaired", images)
    checking.check(config, tmp_path / "check", timeout=60, repeat=False, tracer="python")

    seen = observed.read(tmp_path / "check").seen

    assert seen.trace is not None
    assert (seen.trace.tracer, seen.trace.tracer_reason) == ("python", "")
    assert seen.surroundings.machine["tracer"] == "python"

    samples = [sample for batch in seen.batches.batches for sample in batch.samples or ()]
    assert [sample.files for sample in samples] == [(file.name,) for file in sorted(images.iterdir())[:8]]
    assert [sample.index for sample in samples] == [str(place) for place in range(8)]
    assert [batch.worker for batch in seen.batches.batches] == [0, 1]
    assert all(sample.before and sample.after for sample in samples)
    assert seen.loader.random_transforms is not None
    assert [name.rpartition(" ")[2] for name in seen.loader.random_transforms] == ["Compose", "ColorJitter"]
    assert [worker.worker for worker in seen.random_state.workers] == [0, 1]
    assert seen.loader.listing is not None
    assert seen.loader.listing.attribute == "dataset.files"
    assert [row[1] for row in seen.layers or ()] == ["Flatten", "Linear", "Sequential"]
    assert not {**seen.loader.absent, **seen.batches.absent}


BLIND = """
import torch
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16.0).reshape(8, 2))
def make_loader(seed):
    return {loader}
"""


@pytest.mark.parametrize(
    "loader", ["torch.utils.data.DataLoader(Stream(), batch_size=2)", "[torch.ones(2), torch.zeros(2)]"]
)
def test_what_cannot_be_seen_is_null_with_a_reason(loader: str, tmp_path: Path) -> None:
    config = tmp_path / "blind.py"
    config.write_text(BLIND.format(loader=loader), encoding="utf-8")

    verdict = checking.check(config, tmp_path / "check", timeout=60)
    assert verdict is not None
    assert verdict.repeats
    unseen = {stage.name: stage.detail for stage in verdict.stages if stage.status == "unseen"}
    assert set(unseen) == {"file list", "before transform", "initial weights", "first output", "kernel"}
    assert all(unseen.values())
    seen = observed.read(tmp_path / "check").seen
    assert seen.loader.listing is None
    assert seen.loader.absent["listing"]
    assert all(sample.files is None for batch in seen.batches.batches for sample in batch.samples or ())


WRONG = {
    "a loader that raises": ("def make_loader(seed): raise ValueError('no disk')", "make_loader raised .*no disk"),
    "a file that raises": ("raise ValueError('at import')", "its import raised .*at import"),
    "a dataset that raises": (
        "import torch\nclass Bad:\n    def __len__(self): return 4\n    def __getitem__(self, i): raise KeyError(i)\n"
        "def make_loader(seed): return torch.utils.data.DataLoader(Bad(), num_workers=1)",
        "its loader raised .*KeyError",
    ),
    "an empty loader": ("def make_loader(seed): return []", "the loader of .* is empty"),
    "no loader at all": ("def make_loader(seed): return 3", "returned a int"),
    "a model that is none": ("def make_loader(seed): return [1]\ndef make_model(): return 3", "returned a int"),
    "a model that raises": (
        "import torch\ndef make_loader(seed): return [torch.ones(2)]\ndef make_model(): return torch.nn.Linear(3, 3)",
        "its model raised .*RuntimeError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_pipeline_that_cannot_be_run_is_one_line_and_leaves_no_folder(case: str, tmp_path: Path) -> None:
    code, message = WRONG[case]
    (tmp_path / "wrong.py").write_text(code, encoding="utf-8")
    with pytest.raises(HashbenchError, match=message) as caught:
        checking.check(tmp_path / "wrong.py", tmp_path / "check", timeout=60)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"wrong.py", "check.log", "__pycache__"}


def test_what_is_there_already_is_kept(tmp_path: Path) -> None:
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "precious").touch()
    (tmp_path / "pipeline.py").write_text("def make_loader(seed): return [1]", encoding="utf-8")
    with pytest.raises(HashbenchError, match="already exists"):
        checking.check(tmp_path / "pipeline.py", tmp_path / "check", timeout=60)
