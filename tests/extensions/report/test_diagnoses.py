"""What the page tells of one model: its experiments and where their results come from, and excerpts of its traces."""

from __future__ import annotations

import dataclasses
import gzip
import html
import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hashbench.cli import _parser as cli_parser
from hashbench.core.diagnose.causes.evidence import effect
from hashbench.core.diagnose.causes.stats import Effect
from hashbench.core.io import to_json
from hashbench.core.records import Evidence, ExperimentResult, Row, RowEvidence, Trace
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import read_rows, row_from_json, row_key, row_to_json
from hashbench.core.trace import file as tracefile
from hashbench.extensions.report.diagnoses import (
    Excerpt,
    ExperimentView,
    excerpt_of,
    model_views,
    module_tree,
    read_evidence,
    read_excerpts,
    read_tracebacks,
    sweep_again,
)
from hashbench.extensions.report.expectations import assess
from hashbench.extensions.report.history import load_history
from hashbench.extensions.report.nightly import html_of, junit_of
from hashbench.extensions.report.page import render_html
from tests.core.report.rows import write_sweep
from tests.experiment_texts import evidence
from tests.extensions.compiled.compiled_rows import INACCURATE
from tests.extensions.report.histories import DIAGNOSED, diagnosed, failed, history, record, traces
from tests.flat_rows import changed

MOVES = ((None, 4), (1, 8))
RICH = RowEvidence.of(
    (
        ExperimentResult("repeat", "call", trials=33, differing=33, distinct=34, seconds=0.25),
        ExperimentResult("moved", "call", 8, 2, 2, found="all by 4 bytes; memory 1 by 8 bytes", moves=MOVES),
        ExperimentResult("busy", "call", note="raises: no; really (not) today", raised=True),
        ExperimentResult("fresh_process", "process", note="budget"),
    )
)
WRITTEN = to_json(DIAGNOSED.evidence)


# ------------------------------------------------------------------------------------------- where they come from


def test_a_row_file_keeps_all_of_them_and_a_csv_has_their_text() -> None:
    row = dataclasses.replace(DIAGNOSED, evidence=RICH)
    back = row_from_json(json.loads(json.dumps(row_to_json(row))))
    assert back.evidence.results == RICH.results
    assert back.evidence.text == RICH.text
    assert RICH.text == (
        "call/repeat 33/33; call/moved 2/8 [all by 4 bytes; memory 1 by 8 bytes]; "
        "call/busy not run (raises: no; really (not) today); process/fresh_process not run (budget)"
    )


def test_a_sweep_has_them_where_its_row_files_lie(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", dataclasses.replace(DIAGNOSED, evidence=RICH))
    assert load_sweep(folder).rows[0].evidence.results == RICH.results
    assert read_rows(folder / "accuracy.csv")[0].evidence == RICH
    assert read_rows(folder / "accuracy.csv")[0].evidence.results == ()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"evidence": to_json(RICH)}, id="other results"),
        pytest.param({"evidence": {**WRITTEN, "results": to_json(RICH.results)}}, id="a text of other results"),
        pytest.param({"evidence": {**WRITTEN, "results": [{**WRITTEN["results"][0], "trials": 0}]}}, id="bad counts"),
        pytest.param({"evidence": {**WRITTEN, "results": [{"name": "repeat"}]}}, id="no result of an experiment"),
        pytest.param({"evidence": 7}, id="a number"),
        pytest.param({"name": "another"}, id="another model"),
        pytest.param({"dtype": "bfloat16"}, id="different dtype"),
        pytest.param({}, id="not JSON"),
    ],
)
def test_contradicting_row_file_is_ignored(tmp_path: Path, change: dict[str, object]) -> None:
    folder = write_sweep(tmp_path / "sweep", DIAGNOSED)
    (file,) = (folder / "rows").iterdir()
    file.write_text(json.dumps(row_to_json(DIAGNOSED) | change) if change else "{")
    (row,) = load_sweep(folder).rows
    assert row == DIAGNOSED
    assert row.evidence.results == ()


def test_a_bare_csv_is_shown_as_the_text_that_it_is(tmp_path: Path) -> None:
    write_sweep(tmp_path / "with", DIAGNOSED)
    write_sweep(tmp_path / "bare", dataclasses.replace(DIAGNOSED, evidence=RowEvidence(DIAGNOSED.evidence.text)))
    for name, structured in (("with", True), ("bare", False)):
        night = assess([tmp_path / name])
        (view,) = model_views(night.history, {})
        assert bool(view.experiments) == structured
        assert (f"<dt>Evidence</dt><dd>{DIAGNOSED.evidence.text}</dd>" in render_html(night)) != structured


# ------------------------------------------------------------------------------------------------- what they say


def read(*texts: str) -> dict[str, ExperimentView]:
    row = dataclasses.replace(DIAGNOSED, evidence=evidence(*texts))
    return {one.result.name: one for one in read_evidence(row)}


@pytest.mark.parametrize(
    ("texts", "arm", "words"),
    [
        (("call/repeat 33/33", "call/one_thread 0/20"), "one_thread", "gone"),
        (("call/repeat 1/20", "call/one_thread 0/20"), "one_thread", "gone, but too few trials to be sure"),
        (("call/repeat 33/33", "call/one_thread 20/20"), "one_thread", "still differs"),
        (("call/repeat 33/33", "call/one_thread 2/20"), "one_thread", "rarer, still there"),
        (("call/repeat 0/20", "call/busy 3/20"), "busy", "brings it about"),
        (("call/repeat 0/20", "call/busy 0/20"), "busy", "agrees too"),
        (("call/repeat 20/20", "call/poison 20/20"), "poison", "depends on uninitialised memory"),
        (("call/repeat 20/20", "call/poison 0/20"), "poison", "does not depend on it"),
        (("call/one_thread 3/20",), "one_thread", "differs"),
        (("compilation/no_fusion 0/1",), "no_fusion", "gone"),
        (("compilation/no_fusion 1/1",), "no_fusion", "still there"),
        (("call/repeat 20/20",), "repeat", ""),
    ],
)
def test_an_experiment_is_said_to_be(texts: tuple[str, ...], arm: str, words: str) -> None:
    assert read(*texts)[arm].effect == words


@pytest.mark.parametrize(
    ("texts", "place", "rule", "words"),
    [
        pytest.param(
            ("pair/pair 0/20", "process/within_process 0/4", "process/fresh_process 20/20", "process/fixed_order 0/20"),
            ("fixed_order", "process"),
            Effect.ABSENT,
            "agrees too",
            id="processes differ from each other and not in themselves",
        ),
        pytest.param(
            ("call/repeat 20/20~2", "call/one_thread 0/20"),
            ("one_thread", "call"),
            Effect.SEEMS,
            "gone, but too few trials to be sure",
            id="one odd outcome among 21, which happened to be the first",
        ),
    ],
)
def test_the_page_and_the_rules_agree(
    texts: tuple[str, ...], place: tuple[str, str], rule: Effect, words: str, tmp_path: Path
) -> None:
    found = evidence(*texts)
    assert effect(Evidence("kernel", arms=found.results), *place) is rule

    folder = write_sweep(tmp_path / "sweep", dataclasses.replace(DIAGNOSED, evidence=found))
    (view,) = model_views(load_history([folder]), {})
    shown = {one.result.name: one.effect for one in view.experiments}
    assert shown[place[0]] == words


def test_commands_parse_and_their_paths_exist(tmp_path: Path) -> None:
    names = ("traces/one.run1.log", "traces/one.run2.log", f"{DIAGNOSED.repro}/repro.py")
    for name in names:
        (tmp_path / "my nights" / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my nights" / "one" / name).touch()
    row = dataclasses.replace(DIAGNOSED, suite="zoo", dtype="bfloat16", dev="cuda")
    environment = {
        "schema": 1,
        "key": "e1",
        "command_line": ["hashbench", "sweep", "--suite", "../my zoo.py", "zoos/zoo.py"],
    }
    folder = write_sweep(tmp_path / "my nights" / "one", row, environment=environment)
    (view,) = model_views(load_history([folder]), {})
    python, *commands = (shlex.split(line) for _, line in view.commands)
    assert python == ["uv", "run", str(folder / names[2])]
    assert [words[1] for words in commands] == ["replay", "diff", "sweep"]
    assert commands[1][2:] == [str(folder / name) for name in names[:2]]
    sweep = cli_parser().parse_args(commands[2][1:])
    assert (sweep.suite, sweep.mode, sweep.only, sweep.dtype) == (["zoos/zoo.py"], "training", [row.name], "bfloat16")
    for words in commands:
        cli_parser().parse_args(words[1:])


@pytest.mark.parametrize(("runs", "words"), [(2, ["ranks", "diff"]), (1, ["ranks", "check"])])
def test_the_traces_of_ranks_have_commands_of_their_own(tmp_path: Path, runs: int, words: list[str]) -> None:
    names = [f"traces/one.run{number}" for number in range(1, runs + 1)]
    for name in names:
        (tmp_path / "one" / name).mkdir(parents=True)
    row = changed(DIAGNOSED, repro="", rank=1, world_size=2, traces=" ".join(names))
    folder = write_sweep(tmp_path / "one", row)
    (view,) = model_views(load_history([folder]), {})
    line = shlex.split(view.commands[0][1])
    assert line == ["hashbench", *words, *(str(folder / name) for name in names)]
    cli_parser().parse_args(line[1:])


def test_the_repro_of_a_collective_runs_on_all_members_of_its_group(tmp_path: Path) -> None:
    row = changed(DIAGNOSED, origin="collective", rank=0, world_size=4, group="0-2", traces="")
    (tmp_path / "one" / row.repro).mkdir(parents=True)
    (view,) = model_views(load_history([write_sweep(tmp_path / "one", row)]), {})
    words = shlex.split(view.commands[0][1])
    assert words == ["torchrun", "--nproc-per-node", "2", str(tmp_path / "one" / row.repro / "repro.py")]
    assert "replay" not in [line.split()[1] for _, line in view.commands]


def test_a_compiled_model_is_compiled_again() -> None:
    row = dataclasses.replace(INACCURATE, env="e1")
    words = ["hashbench", "sweep", "--compilations", "3", "--threads", "2"]
    again = " ".join(sweep_again(row, {"e1": {"command_line": words}}))
    assert "--backend inductor --compilations 3 --threads 2" in again
    assert cli_parser().parse_args(again.split()[1:]).backend == "inductor"
    eager = sweep_again(dataclasses.replace(row, backend=""), {"e1": {"command_line": words}})
    assert not {"--backend", "--compilations"} & set(eager)


@pytest.mark.parametrize("repro", ["", "../elsewhere", "/etc"])
def test_no_command_leads_out_of_the_folder_of_the_sweep(tmp_path: Path, repro: str) -> None:
    folder = write_sweep(tmp_path / "one", dataclasses.replace(DIAGNOSED, repro=repro, traces="../../a.log b.log"))
    (view,) = model_views(load_history([folder]), {})
    assert [line.split()[1] for _, line in view.commands] == ["sweep"]


LOG = "noise\nTraceback (most recent call last):\n  old\nTraceback (most recent call last):\n  File x\nKeyError: <7>\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        pytest.param(LOG, "Traceback (most recent call last):\n  File x\nKeyError: <7>", id="the last traceback"),
        pytest.param(
            "Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault", id="no traceback"
        ),
        pytest.param("x" * 100_000, "… " + "x" * 4000, id="a long log"),
        pytest.param(None, "", id="no log"),
    ],
)
def test_what_failed_has_the_end_of_its_log(tmp_path: Path, log: str | None, told: str) -> None:
    row = failed("broken", accuracy="eager_1st_run_fail", error="KeyError: 7")
    folder = write_sweep(tmp_path / "one", row, dataclasses.replace(DIAGNOSED, suite="torchvision"))
    if log is not None:
        (folder / "logs").mkdir()
        (folder / "logs" / "torchvision.training.broken.log").write_text(log)
    judged = assess([folder])
    assert read_tracebacks(judged.history) == ({row_key(row): told} if told else {})
    (failure,) = (
        one.text or "" for one in ElementTree.fromstring(junit_of(judged)).iter("failure") if one.get("type") == "fails"
    )
    assert failure.endswith(told)
    assert "error: KeyError: 7" in failure
    assert html.escape(told.splitlines()[-1][:100] if told else "").replace("&#x27;", "&#39;") in html_of(judged)


def test_bounds_are_those_of_the_counts() -> None:
    rate = read("call/repeat 10/20")["repeat"].rate
    assert rate is not None
    assert (rate.share, rate.low, rate.high) == pytest.approx((0.5, 0.272, 0.728), abs=0.001)


def test_impossible_counts_are_not_computed_with() -> None:
    assert read("call/repeat 999999999/999999999", "call/one_thread 1/999999999")["one_thread"].effect == ""


def test_the_base_comes_first_and_what_was_not_run_last() -> None:
    found = read("call/busy (why)", "call/one_thread 0/20", "call/repeat 20/20", "pair/pair 8/8")
    assert list(found) == ["repeat", "one_thread", "pair", "busy"]


def test_experiments_that_were_not_run_share_their_reason() -> None:
    row = dataclasses.replace(DIAGNOSED, evidence=evidence("call/busy (x)", "call/moved (y)", "call/poison (x)"))
    (view,) = model_views(history([row]), {})
    told = {note: [result.name for result in results] for note, results in view.not_run.items()}
    assert told == {"x": ["busy", "poison"], "y": ["moved"]}


def test_an_experiment_of_a_later_version_is_named_by_its_name() -> None:
    found = RowEvidence.of((ExperimentResult("blue_moon", "call", 20, 3, 4),))
    (one,) = read_evidence(dataclasses.replace(DIAGNOSED, evidence=found))
    assert (one.phrase, one.effect) == ("blue moon", "differs")


# ------------------------------------------------------------------------------------------- excerpts of traces

SWEEP = "specimens_training"


def written(folder: Path, pair: tuple[Trace, Trace] | None = None) -> Path:
    for number, trace in enumerate(pair or traces(), start=1):
        tracefile.write(trace, folder / "traces" / f"one.run{number}.log")
    return folder


def read_of(night: Path, row: Row = DIAGNOSED) -> Excerpt:
    return next(iter(read_excerpts(history([row], folder=night)).values()))


def test_steps_stand_side_by_side_around_the_divergence() -> None:
    found = excerpt_of(*traces(), DIAGNOSED)
    assert [(step.record.op, step.same, step.here) for step in found.steps] == [
        ("aten.mm.default", True, False),
        ("aten.tanh.default", True, False),
        ("aten.index_put.default", False, True),
        ("aten.sum.default", False, False),
    ]
    put = found.steps[2]
    assert put.first is not None
    assert put.second is not None
    assert [token.differs for token in put.first.reads] == [False]
    assert [token.text for token in put.first.writes] == ["float32[4]:aaaa000000000000"]
    assert [(token.text, token.differs) for token in put.second.writes] == [("float32[4]:cccc000000000000", True)]


def test_what_reads_a_difference_shows_it() -> None:
    last = excerpt_of(*traces(), DIAGNOSED).steps[-1]
    assert last.first is not None
    assert [(token.text, token.differs) for token in last.first.reads] == [
        ("0 ← aten.index_put.default#0 aaaa0000", True)
    ]


def test_a_step_that_only_one_run_has_stands_alone() -> None:
    first, second = traces()
    shorter = dataclasses.replace(second, records=second.records[:2])
    found = excerpt_of(first, shorter, DIAGNOSED)
    assert [(step.first is None, step.second is None) for step in found.steps] == [
        (False, False),
        (False, False),
        (False, True),
        (False, True),
    ]
    assert found.steps[2].here
    assert not any(token.differs for token in found.steps[2].first.writes)  # there is nothing to differ from


def test_context_limits_the_steps_and_not_the_total() -> None:
    found = excerpt_of(*traces(), DIAGNOSED, context=0)
    assert (len(found.steps), found.total) == (1, 4)


def test_the_module_tree_counts_what_ran_and_what_differs() -> None:
    tree = excerpt_of(*traces(), DIAGNOSED).tree
    assert [(branch.depth, branch.name, branch.steps, branch.differing, branch.here) for branch in tree] == [
        (0, "Net", 4, 2, False),
        (1, "encode", 2, 0, False),
        (1, "gather", 1, 1, True),
        (1, "update", 1, 1, False),
    ]


def test_far_siblings_are_folded_into_one_line_each_side() -> None:
    records = [record(f"aten.op{n}.default", module=f"Net.layer{n}", value=f"{n}") for n in range(30)]
    trace = Trace(tuple(records))
    row = diagnosed("big", op_index=15, kernel="aten.op15.default", module="Net.layer15")
    tree = excerpt_of(trace, trace, row).tree
    assert [(branch.name, branch.folded) for branch in tree if branch.folded] == [("", 11), ("", 10)]
    assert [branch.name for branch in tree if branch.here] == ["layer15"]
    assert len(tree) == 1 + 9 + 2


def test_a_tree_without_modules_is_empty() -> None:
    assert module_tree((), "") == ()


def test_traces_are_read_in_the_folder_of_their_sweep(tmp_path: Path) -> None:
    written(tmp_path / "another_training")
    assert "not in the sweep's folder" in read_of(tmp_path).missing
    assert read_of(tmp_path).folder == ""
    folder = written(tmp_path / SWEEP)
    found = read_of(tmp_path)
    assert (found.missing, found.folder) == ("", str(folder))


def test_traces_of_the_rank_where_the_runs_part_are_read(tmp_path: Path) -> None:
    row = changed(DIAGNOSED, rank=1, world_size=2, traces="traces/one.run1 traces/one.run2")
    for number, trace in enumerate(traces(), start=1):
        tracefile.write(trace, tmp_path / SWEEP / "traces" / f"one.run{number}" / "rank1.log.gz")
    found = read_of(tmp_path, row)
    assert (found.missing, len(found.steps)) == ("", 4)


@pytest.mark.parametrize("way", ["a path", "a link"])
def test_what_leads_out_of_the_folder_is_not_followed(tmp_path: Path, way: str) -> None:
    written(tmp_path / "elsewhere")
    folder = tmp_path / "night" / SWEEP
    folder.mkdir(parents=True)
    (folder / "traces").symlink_to(tmp_path / "elsewhere" / "traces")
    up = "../../elsewhere/" if way == "a path" else ""
    row = diagnosed("sly", traces=" ".join(f"{up}traces/one.run{number}.log" for number in (1, 2)))
    assert "not in the sweep's folder" in read_of(tmp_path / "night", row).missing


@pytest.mark.parametrize(
    ("row", "cut", "words"),
    [
        pytest.param(DIAGNOSED, 30, "truncated", id="a damaged trace"),
        pytest.param(diagnosed("other", kernel="aten.cumsum.default"), 0, "of other runs", id="traces of other runs"),
        pytest.param(diagnosed("early", op_index=None), 0, "entered at no op", id="a difference that entered at no op"),
    ],
)
def test_why_there_is_nothing_to_show(tmp_path: Path, row: Row, cut: int, words: str) -> None:
    file = written(tmp_path / SWEEP) / "traces" / "one.run2.log"
    text = file.read_text()
    file.write_text(text[: len(text) - cut])
    assert words in read_of(tmp_path, row).missing


def packed(folder: Path) -> Path:
    """Compress the traces that :func:`written` writes, under their names."""
    for path in (written(folder) / "traces").iterdir():
        path.write_bytes(gzip.compress(path.read_bytes()))
    return folder


def test_compressed_traces_give_the_same_excerpt(tmp_path: Path) -> None:
    written(tmp_path / "plain" / SWEEP)
    packed(tmp_path / "packed" / SWEEP)
    plain, compressed = (read_of(tmp_path / name) for name in ("plain", "packed"))
    assert compressed.missing == ""
    assert dataclasses.replace(compressed, folder="") == dataclasses.replace(plain, folder="")


def test_limit_counts_decompressed_bytes(tmp_path: Path) -> None:
    found = history([DIAGNOSED], folder=packed(tmp_path / SWEEP).parent)
    files = list((tmp_path / SWEEP / "traces").iterdir())
    size = sum(len(gzip.decompress(file.read_bytes())) for file in files)
    assert size > 2 * sum(file.stat().st_size for file in files)
    shown, refused = (
        excerpt.missing for limit in (size, size - 1) for excerpt in read_excerpts(found, mib=limit / 2**20).values()
    )
    assert (shown, "too large" in refused) == ("", True)


def test_understated_size_is_no_way_past_the_limit(tmp_path: Path) -> None:
    found = history([DIAGNOSED], folder=packed(tmp_path / SWEEP).parent)
    files = list((tmp_path / SWEEP / "traces").iterdir())
    for file in files:
        file.write_bytes(file.read_bytes()[:-4] + (1).to_bytes(4, "little"))
    (excerpt,) = read_excerpts(found, mib=sum(file.stat().st_size for file in files) / 2**20).values()
    assert "cannot be shown: cannot read the trace" in excerpt.missing
    assert "more than" in excerpt.missing


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    found = history([diagnosed(f"m{n}") for n in range(5)], folder=written(tmp_path / SWEEP).parent)
    assert len(read_excerpts(found, limit=2)) == 2
    size = sum(file.stat().st_size for file in (tmp_path / SWEEP / "traces").iterdir()) / 2**20
    missing = [excerpt.missing for excerpt in read_excerpts(found, mib=2.5 * size).values()]
    assert missing[:2] == ["", ""]
    assert all("too large" in words for words in missing[2:])
    assert len(missing) == 5


def test_traces_that_cannot_be_opened_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / SWEEP)

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    assert "Permission denied" in read_of(tmp_path).missing
