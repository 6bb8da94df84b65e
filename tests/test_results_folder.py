"""Who may write into a results folder, and which names its files have."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from sweep_helpers import NoExecutor, names_in_csv, started, sweep, sweep_process, wait_until
from sweep_targets import spec

from hashbench.errors import HashbenchError
from hashbench.results.folder import ResultsFolder, file_key
from hashbench.sweep.run import ModelStarted


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "results"


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
