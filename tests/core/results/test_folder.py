"""Results folders: who may write into one, which names its files have, and shards of one sweep joined."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
from sweep_helpers import NoExecutor, names_in_csv, snapshot, started, sweep, sweep_process, wait_until
from sweep_targets import spec

from hashbench.cli import main
from hashbench.core.errors import HashbenchError
from hashbench.core.report.compare import Became, compare
from hashbench.core.results.folder import Partition, ResultsFolder, file_key
from hashbench.core.results.load import load_sweep
from hashbench.core.results.merge import merge
from hashbench.core.suites.selection import Selection
from hashbench.core.sweep.run import ModelStarted


def test_two_sweeps_into_one_folder_the_second_is_refused(output):
    refused = []

    def start_another(event):
        if isinstance(event, ModelStarted):
            for resume in (False, True):
                with pytest.raises(HashbenchError, match="another sweep is writing into") as caught:
                    sweep([spec("a")], output, resume=resume)
                refused.append(caught)

    sweep([spec("a")], output, on_event=start_another)
    assert len(refused) == 2
    assert names_in_csv(output) == ["a"]


def test_the_lock_goes_with_the_parent_not_with_what_it_started(output):
    with sweep_process(output, "a=hang") as process:
        wait_until(started(output, 1))
        stopped = [p for p in psutil.Process(process.pid).children(recursive=True) if p.status() != "zombie"]
        for child in stopped:
            child.suspend()  # so that none of them can end before the folder is claimed
        process.kill()
        process.wait()
        with ResultsFolder(output).claimed(resume=True):
            pass
        for child in stopped:
            child.kill()


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("{tmp}/file", id="a file is in the way"),
        pytest.param("{tmp}/file/results", id="a parent is a file"),
        pytest.param("/dev/null/results", id="below a device"),
        pytest.param("/proc/hashbench/results", id="where nothing can be created"),
        pytest.param("{tmp}/" + "x" * 300, id="a name that is too long"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, folder):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HashbenchError, match=r"cannot write results into .*nothing was run\. Choose another"):
        sweep([spec("a")], Path(folder.format(tmp=tmp_path)), executor=NoExecutor())
    assert (tmp_path / "file").read_text() == "mine"


def changed_at(folder: Path):
    """All that lies in a folder, links as such, and when each was last changed."""
    return {path: (path.lstat().st_ino, path.lstat().st_ctime_ns) for path in folder.rglob("*")}


LINKS = ["accuracy.csv", "sweep.json", "environment.json", ".lock", "rows", "rows/fake.inference.a.json", "traces/deep",
         "logs/fake.inference.a.log", "repro"]  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("held", ["", "file", "folder"], ids=["that leads nowhere", "to a file", "to a folder"])
def test_nothing_is_written_through_a_link_of_another(output, name, held):
    nightly = pytest.importorskip("hashbench.extensions.report.nightly")
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    target = output.parent / "precious"
    if held:
        target.write_text("mine") if held == "file" else target.mkdir()
    (output / name).symlink_to(target)
    before = changed_at(output.parent)
    for claim in (ResultsFolder(output).claimed(resume=True), nightly.claimed(output)):
        with pytest.raises(HashbenchError, match=rf"{name} is a symbolic link: what .* nothing was run"):
            claim.__enter__()
    assert changed_at(output.parent) == before


def test_links_that_no_sweep_touches_may_lie_in_its_folder(output, tmp_path):
    """A project with a virtual environment; and the folder itself may be one, since its user names it."""
    (output / ".venv" / "bin").mkdir(parents=True)
    (output / ".venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    (tmp_path / "named").symlink_to(output)
    sweep([spec("a")], tmp_path / "named")
    assert names_in_csv(output) == ["a"]


def test_a_backup_by_hard_links_stays_as_it_is(output, tmp_path):
    """Lines are appended to the CSV, and a log is emptied when its model runs again."""
    models, folder = [spec("a"), spec("b")], ResultsFolder(output)
    first, second = sweep(models, output).rows
    folder.row_path("fake.inference.b").unlink()
    folder.rebuild_csv([first])
    folder.log_path("fake.inference.b").write_text("what was printed first")
    shutil.copytree(output, tmp_path / "backup", copy_function=os.link)
    before = {path: path.read_bytes() for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    assert [row.name for row in sweep(models, output, resume=True).rows] == [first.name, second.name]
    assert {path: path.read_bytes() for path in before} == before


def test_missing_parents_are_created(tmp_path):
    sweep([spec("a")], tmp_path / "one" / "two")
    assert names_in_csv(tmp_path / "one" / "two") == ["a"]


ODD_NAMES = [
    "A.b-c_1",
    "a/b",
    "a_b",
    "a b",
    "..",
    "../../up",
    "ü",
    "名前",
    "x" * 300,
    "x" * 299 + "y",
    "a\nb",
    "a~b",
    "-rf",
    "=1+1",
]


@pytest.mark.slow
def test_names_that_are_no_file_names_work_and_do_not_collide(output):
    models = [spec(name) for name in ODD_NAMES]
    sweep(models, output)
    assert {path.name for path in output.parent.iterdir()} == {"results", "ran.txt"}
    assert len(list((output / "rows").iterdir())) == len(ODD_NAMES)
    again = sweep(models, output, resume=True, executor=NoExecutor())
    assert [row.name for row in again.rows] == ODD_NAMES


def test_a_suite_cannot_pass_for_another_suite_and_mode():
    twins = [("x", "y.training.z"), ("x.training.y", "z"), ("/zoo/x.py", "z"), ("_zoo_x_py", "z")]
    keys = {file_key(suite=suite, mode="training", name=name) for suite, name in twins}
    assert len(keys) == 4
    assert file_key(suite="torchvision", mode="training", name="vit_b_16") == "torchvision.training.vit_b_16"


NAMES = ["a", "b", "c", "d", "e/f"]
WHOLE = tuple(("fake", name) for name in NAMES)
TOTAL = 3
CHANGING = ("seconds", "overhead_seconds", "detail", "env")


def shard(folder: Path, number: int, *, total=TOTAL, behaviour="print", **arguments) -> Path:
    """What ``--total-partitions --partition-id`` would run, with stand-ins."""
    models = [spec(name, behaviour) for name in NAMES]
    part = Selection(total_partitions=total, partition_id=number).of(models)
    output = folder / f"shard{number}"
    sweep(part, output, partition=Partition(number, total, WHOLE), environment={"key": f"e{number}"}, **arguments)
    (output / "traces" / f"{part[0].name.replace('/', '_')}.log").write_text("a trace")
    repro = output / "repro" / part[0].name.replace("/", "_")
    repro.mkdir(parents=True)
    (repro / "call.json").write_text("{}")
    return output


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [shard(folder, number) for number in range(TOTAL)]


@pytest.fixture
def shards(made, tmp_path) -> list[Path]:
    """Copies that a test may damage."""
    return [Path(shutil.copytree(one, tmp_path / one.name)) for one in made]


def stable(path: Path) -> list[list[str]]:
    """A CSV without what no two sweeps have in common."""
    header, *rows = csv.reader(path.open(newline=""))
    kept = [place for place, name in enumerate(header) if name not in CHANGING]
    return [[row[place] for place in kept] for row in (header, *rows)]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
def test_the_merged_folder_is_that_of_a_sweep_that_was_never_cut(shards, tmp_path):
    edited(shards[2] / "sweep.json", began="2026-11-19T22:00:00+00:00")
    before = [snapshot(one) for one in shards]
    merged = merge(tmp_path / "merged", list(reversed(shards)))
    assert (merged.rows, merged.shards, merged.missing) == (5, 3, ())
    uncut = tmp_path / "uncut"
    sweep([spec(name, "print") for name in NAMES], uncut)
    assert stable(merged.output / "accuracy.csv") == stable(uncut / "accuracy.csv")
    asked = [json.loads((folder / "sweep.json").read_text()) for folder in (merged.output, uncut)]
    assert asked[0] == asked[1] | {"began": "2026-11-19T22:00:00+00:00"}
    left = {name for name in files(merged.output) if not name.startswith(("traces/", "repro"))}
    assert left == {name for name in files(uncut) if name != ".lock"}
    assert [snapshot(one) for one in shards] == before


def test_logs_traces_repros_rows_and_environments_are_kept(shards, tmp_path):
    output = merge(tmp_path / "merged", shards).output
    for one in shards:
        for path in one.rglob("*"):
            place = output / path.relative_to(one)
            if path.is_file() and len(path.relative_to(one).parts) > 1:
                assert place.read_bytes() == path.read_bytes()
    environment = json.loads((output / "environment.json").read_text())
    assert (environment["key"], environment["previous"]) == ("e0", [{"key": "e1"}, {"key": "e2"}])
    assert [row.env for row in load_sweep(output).rows] == ["e0", "e1", "e2", "e2", "e2"]


def test_a_merged_sweep_can_be_resumed_like_any_other(shards, tmp_path):
    output = merge(tmp_path / "merged", shards).output
    again = sweep([spec(name, "print") for name in NAMES], output, resume=True, executor=NoExecutor())
    assert again.rows == load_sweep(output).rows
    assert len(again.rows) == 5


def test_a_missing_shard_is_allowed_only_by_name_and_compare_misses_its_models(shards, tmp_path):
    with pytest.raises(HashbenchError, match=r"partition 1 of 3 is missing: 1 model would have no row \(b\).*--allow"):
        merge(tmp_path / "merged", [shards[0], shards[2]])
    assert not (tmp_path / "merged").exists()
    merged = merge(tmp_path / "merged", [shards[0], shards[2]], allow_missing=True)
    assert (merged.rows, merged.missing) == (4, (("fake", "b"),))
    whole = merge(tmp_path / "whole", shards).output
    outcomes = {
        change.key[-1]: change.outcome for change in compare(load_sweep(whole), load_sweep(merged.output)).changes
    }
    assert outcomes == {name: Became.MISSING if name == "b" else Became.UNCHANGED for name in NAMES}
    rows = sweep([spec(name, "print") for name in NAMES], merged.output, resume=True).rows
    assert [row.name for row in rows] == NAMES


def test_the_same_shard_twice_is_an_overlap(shards, tmp_path):
    shutil.copytree(shards[1], tmp_path / "again")
    with pytest.raises(HashbenchError, match=r"shard1 and .*again both hold b of fake"):
        merge(tmp_path / "merged", [*shards, tmp_path / "again"])


def edited(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def without_a_row(folder: Path) -> None:
    (folder / "rows" / "fake.inference.d.json").unlink()


def cut_row(folder: Path) -> None:
    path = folder / "rows" / "fake.inference.d.json"
    path.write_bytes(path.read_bytes()[:-9])


def other_options(folder: Path) -> None:
    options = json.loads((folder / "sweep.json").read_text())["options"]
    edited(folder / "sweep.json", options={**options, "seed": 7})


def other_tracer(folder: Path) -> None:
    options = json.loads((folder / "sweep.json").read_text())["options"]
    edited(folder / "sweep.json", options={**options, "tracer": "native"})


def other_mode(folder: Path) -> None:
    for path in (folder / "rows").glob("*.json"):
        edited(path, mode="training")
        path.rename(path.with_name(path.name.replace("inference", "training")))
    options = json.loads((folder / "sweep.json").read_text())["options"]
    edited(folder / "sweep.json", options={**options, "mode": "training"})


def manifest(**fields):
    return lambda folder: edited(folder / "sweep.json", **fields)


OF = [list(model) for model in WHOLE]

BAD = [
    (without_a_row, r"shard2 is not finished: 1 of 3 models have no row \(d\)\. .*--resume"),
    (cut_row, r"cannot merge .*shard2: rows/fake\.inference\.d\.json is not a row of d"),
    (lambda folder: (folder / "sweep.json").unlink(), r"cannot read .*shard2/sweep\.json: No such file"),
    (lambda folder: (folder / "sweep.json").write_text("{"), r"cannot read .*sweep\.json: it is not JSON"),
    (lambda folder: (folder / "sweep.json").write_text("[]"), r"sweep\.json: it holds no JSON object"),
    (lambda folder: (folder / "environment.json").unlink(), r"cannot read .*environment\.json"),
    (lambda folder: (folder / "environment.json").write_text('{"previous": 1}'), r"where its rows were made"),
    (manifest(models=7), r"does not say which models"),
    (manifest(options=[]), r"does not say which models"),
    (manifest(partition={"id": 5, "total": 3, "of": OF}), r"says that it is partition 5 of 3"),
    (manifest(partition={"id": 2, "total": 10**12, "of": OF}), r"partition 2 of 1000000000000"),
    (manifest(schema=2), r"sweep\.json has schema 2; hashbench .* wrote it"),
    (manifest(schema=9), r"sweep\.json has schema 9"),
    (manifest(rows=99), r"its rows have schema 99"),
    (other_options, r"not shards of one sweep: seed was 1337 and is 7"),
    (other_tracer, r"not shards of one sweep: tracer was 'auto' and is 'native'"),
    (other_mode, r"mode was 'inference' and is 'training'"),
    (manifest(partition={"id": 2, "total": 4, "of": OF}), r"one is of 3 partitions, the other of 4"),
    (manifest(partition={"id": 2, "total": 3, "of": [*OF, ["fake", "z"]]}), r"parts of other selections"),
    (lambda folder: (folder / "logs" / "x").symlink_to("/etc/passwd"), r"logs/x is not a plain file"),
    (lambda folder: (folder / "extra").symlink_to("/etc"), r"extra is a link"),
    (lambda folder: os.mkfifo(folder / "logs" / "x"), r"logs/x is not a plain file"),
    (lambda folder: (folder / "traces" / "a.log").write_text("mine"), r"another shard has traces/a\.log, too"),
]


@pytest.mark.parametrize(("damage", "said"), BAD, ids=[said for _, said in BAD])
def test_what_is_refused(shards, tmp_path, damage, said):
    damage(shards[2])
    with pytest.raises(HashbenchError, match=said) as caught:
        merge(tmp_path / "merged", shards)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard0", "shard1", "shard2"]


def test_shards_of_two_versions_of_a_zoo_file_are_refused(shards, tmp_path):
    for at, shard in enumerate(shards):
        edited(shard / "sweep.json", digests={"fake": str(at // 2), "other": str(at)} if at else {"fake": "0"})
    with pytest.raises(HashbenchError, match=r"not shards of one sweep: the files of fake changed between them"):
        merge(tmp_path / "merged", shards)


def test_two_whole_sweeps_are_no_shards(tmp_path):
    for name in "ab":
        sweep([spec(name)], tmp_path / name)
    with pytest.raises(HashbenchError, match="both are whole sweeps"):
        merge(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"])


def test_a_shard_that_is_being_written_is_refused(shards, tmp_path):
    with (shards[1] / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HashbenchError, match=r"a sweep is writing into .*shard1"):
            merge(tmp_path / "merged", shards)


def test_a_folder_with_anything_in_it_is_not_touched(shards, tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine.txt").write_text("mine")
    with pytest.raises(HashbenchError, match="is not an empty folder"):
        merge(tmp_path / "merged", shards)
    assert files(tmp_path / "merged") == ["mine.txt"]


def test_a_shard_cannot_hold_the_merged_folder(shards):
    before = files(shards[0])
    with pytest.raises(HashbenchError, match=r"merged would be inside of .*shard0: .* Name a folder outside of them"):
        merge(shards[0] / "merged", shards)
    assert files(shards[0]) == before


def test_an_empty_folder_may_be_there(shards, tmp_path):
    (tmp_path / "merged").mkdir()
    assert merge(tmp_path / "merged", shards).rows == 5


def test_the_command_line(shards, tmp_path, capsys):
    assert main(["merge", str(tmp_path / "merged"), *map(str, shards[1:]), "--allow-missing"]) == 0
    said = capsys.readouterr().out
    assert "1 model without a row: a" in said
    assert "4 rows of 2 shards" in said
    assert main(["merge", str(tmp_path / "other"), str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith(f"hashbench: {tmp_path / 'nothing'} does not exist")


def test_a_shard_of_another_partition_is_not_resumed(shards):
    models = [spec("b", "print")]
    with pytest.raises(HashbenchError, match=r"it was partition 1 of 3 and is 1 of 4"):
        sweep(models, shards[1], partition=Partition(1, 4, WHOLE), resume=True)
    same = Partition(1, TOTAL, WHOLE)
    assert len(sweep(models, shards[1], partition=same, resume=True, executor=NoExecutor()).rows) == 1
