"""Several ranks beside one process: gloo processes of this machine, clean and with planted mistakes."""

from __future__ import annotations

import linecache
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hashbench.core.divergence.content import Kind
from hashbench.core.errors import HashbenchError
from hashbench.core.suites.user_file import UserFile
from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.file import EXAMPLE, load_sides, read_side
from hashbench.extensions.implementations.pair.record import RecordedRun, record_run
from hashbench.extensions.implementations.pair.run_files import read_run, write_run
from hashbench.extensions.implementations.pair.running import recorded
from hashbench.extensions.implementations.pair.shards import fitted, merged
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, PairOutcome
from tests.extensions.implementations.pair import ranked_blocks as blocks

ONE = Side(blocks.one, blocks.inputs)


def beside(make: Callable[[], object], *, inputs: Callable[[], object] = blocks.inputs, **more: object) -> Side:
    return Side(make, inputs, **{"ranks": 2, **more})  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- real ranks


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
class TestProcesses:
    @pytest.mark.parametrize(
        "side",
        [
            pytest.param(beside(blocks.sharded), id="tensor parallel by hand"),
            pytest.param(beside(blocks.sharded, ranks=4), id="four ranks"),
            pytest.param(beside(blocks.by_dtensor), id="DTensor"),
            pytest.param(beside(partial(blocks.sharded, "only rank 0 logs")), id="rank 0 calls more ops"),
        ],
    )
    def test_the_same_function_on_ranks_differs_by_rounding_alone(self, side: Side) -> None:
        verdict = compare_implementations(ONE, side)

        assert verdict.outcome is PairOutcome.ROUNDING, verdict
        assert all(result.units is not None and result.units < 16 for result in verdict.results)
        assert verdict.weights_reason.startswith("a side runs on several ranks")

    def test_gradients_of_dtensors_are_those_of_one_process(self) -> None:
        verdict = compare_implementations(
            Side(blocks.one, blocks.inputs, loss=blocks.squares), beside(blocks.by_dtensor, loss=blocks.squares)
        )

        assert verdict.outcome is PairOutcome.ROUNDING, verdict

    def test_ranks_with_parts_of_a_batch_are_equal_bit_by_bit(self) -> None:
        verdict = compare_implementations(ONE, beside(blocks.one, inputs=blocks.own_items))

        assert verdict.outcome is PairOutcome.EQUAL, verdict
        assert [result.units for result in verdict.results] == [0.0]

    @pytest.mark.parametrize(
        ("mistake", "line"),
        [
            ("shard twice", "# planted: shard"),
            ("bias on every rank", "# planted: bias"),
            ("heads swapped", "weights = torch.softmax("),
        ],
    )
    def test_a_mistake_is_named_at_its_line(self, mistake: str, line: str) -> None:
        verdict = compare_implementations(ONE, beside(partial(blocks.sharded, mistake)))

        assert verdict.outcome is PairOutcome.MISTAKE, verdict
        assert line in source_of_b(verdict)
        assert not verdict.parted[0].note

    @pytest.mark.parametrize(
        ("mistake", "line"),
        [("no reduction", "# planted: reduction"), ("residual on every rank", "# planted: residual")],
    )
    def test_what_reads_a_partial_sum_is_named_not_what_computes_it(self, mistake: str, line: str) -> None:
        verdict = compare_implementations(
            Side(partial(blocks.one, bias=False), blocks.inputs), beside(partial(blocks.sharded, mistake, bias=False))
        )

        assert verdict.outcome is PairOutcome.MISTAKE, verdict
        assert line in source_of_b(verdict)
        assert "a reduction over the ranks is missing" in verdict.parted[0].note
        assert any(b.endswith("float64[4, 7, 32] added up over ranks") for _, b in verdict.parted[0].inputs)

    @pytest.mark.parametrize("reduced", [True, False])
    def test_a_result_that_is_a_partial_sum_is_a_mistake(self, reduced: bool) -> None:
        verdict = compare_implementations(
            Side(blocks.down, blocks.inputs), beside(partial(blocks.rows, reduced=reduced), inputs=blocks.own_columns)
        )

        assert verdict.outcome is (PairOutcome.ROUNDING if reduced else PairOutcome.MISTAKE), verdict

    def test_a_stale_shard_is_named_beside_its_op(self) -> None:
        verdict = compare_implementations(ONE, beside(partial(blocks.sharded, "shard twice")))

        assert [name for _, _, name in verdict.parted[0].constants] == [
            "up.weight float64[32, 32]",
            "up.bias float64[32]",
        ]

    def test_a_missing_reduction_of_gradients_is_named_in_backward(self) -> None:
        verdict = compare_implementations(
            Side(blocks.one, blocks.inputs, loss=blocks.squares), beside(blocks.sharded, loss=blocks.squares)
        )

        assert verdict.outcome is PairOutcome.MISTAKE
        assert (verdict.parted[0].b.phase, verdict.parted[0].b.module) == ("backward", "Sharded.norm2")  # type: ignore[union-attr]
        assert "a reduction over the ranks is missing" in verdict.parted[0].note

    def test_a_rank_that_raises_is_named_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        with pytest.raises(HashbenchError, match=r"rank 1 ended .* no shard for this rank") as raised:
            compare_implementations(ONE, beside(partial(blocks.sharded, "dies")))

        assert raised.value.what == "cannot run a side on 2 ranks"
        assert "under torchrun" in raised.value.tip
        assert not list(tmp_path.iterdir())

    def test_ranks_that_wait_for_each_other_are_stopped(self) -> None:
        with pytest.raises(HashbenchError, match="did not end") as raised:
            recorded(beside(blocks.make_never_ending, rank_seconds=15.0), 1, wide=True)

        assert "a collective that not every rank calls" in raised.value.tip

    def test_a_file_names_its_ranks(self, tmp_path: Path) -> None:
        path = tmp_path / "pair.py"
        path.write_text(
            "import torch, torch.distributed as dist\n"
            "RANKS_B = 2\n"
            "def make_a(): return torch.nn.Linear(4, 6)\n"
            "def make_b():\n"
            "    made = make_a()\n"
            "    for name in ('weight', 'bias'):\n"
            "        whole = getattr(made, name).detach()\n"
            "        setattr(made, name, torch.nn.Parameter(whole.chunk(2)[dist.get_rank()].clone()))\n"
            "    return made\n"
            "def inputs(): return torch.randn(3, 4)\n",
            encoding="utf-8",
        )

        verdict = compare_implementations(*load_sides(UserFile.read(path, example=EXAMPLE), training=None))

        assert verdict.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING), verdict
        assert verdict.results[0].relative == pytest.approx(0.0, abs=1e-6)


def source_of_b(verdict: ImplementationsVerdict) -> str:
    place = verdict.parted[0].b
    assert place is not None
    number = place.source.partition(" ")[0].rpartition(":")[2]
    return linecache.getline(blocks.__file__, int(number))


# ------------------------------------------------------------------------------------------------------ no ranks


def run_of(model: nn.Module, *, wide: bool = True) -> RecordedRun:
    """Record a model as if it was that of a rank."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [(Kind.INPUT, "input", x), *((Kind.WEIGHT, name, value) for name, value in model.named_parameters())]
    return record_run(lambda: {"output": model(x)}, leaves, model=model, wide=wide)


def linears() -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Return a layer and its two shards."""
    whole = nn.Linear(8, 6).double()
    parts = nn.Linear(8, 3).double(), nn.Linear(8, 3).double()
    for index, part in enumerate(parts):
        part.weight.data, part.bias.data = whole.weight.data.chunk(2)[index], whole.bias.data.chunk(2)[index]
    return whole, *parts


def test_shards_add_up_to_the_whole_and_what_is_equal_counts_once() -> None:
    whole, first, second = linears()
    one, two = run_of(whole), merged([run_of(first), run_of(second), run_of(second)])

    for name in ("output", "input", "weight"):
        ours = one.graph.nodes[one.graph.results.get(name, name)]
        theirs = two.graph.nodes[two.graph.results.get(name, name)]
        assert ours.moments is not None
        assert theirs.moments is not None
        assert ours.moments.agree(theirs.moments, 1e-9), name
        assert ours.numel == theirs.numel, name


def test_digests_of_shards_add_up() -> None:
    whole, first, second = linears()
    one, two = run_of(whole, wide=False), merged([run_of(first, wide=False), run_of(second, wide=False)])

    for name in ("input", "weight", "bias"):
        assert one.digests[name] == two.digests[name], name


def test_a_shard_that_two_ranks_hold_is_not_the_whole() -> None:
    whole, first, _ = linears()
    one, two = run_of(whole), merged([run_of(first), run_of(first)])

    ours, theirs = one.graph.nodes["weight"].moments, two.graph.nodes["weight"].moments
    assert ours is not None
    assert theirs is not None
    assert not ours.agree(theirs, 1e-9)


class Logs(nn.Module):
    """A layer that may compute something beside, on constants of its own."""

    def __init__(self, layer: nn.Module, *, logs: bool) -> None:
        super().__init__()
        self.layer, self.logs = layer, logs
        self.ones, self.twos = [torch.ones(8)], [torch.full((3,), 2.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.logs:
            (x * self.ones[0]).sum()
        return self.layer(x) * self.twos[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_calls_beside_is_kept_apart(rank: int) -> None:
    _, first, second = linears()
    runs = [run_of(Logs(first, logs=rank == 0)), run_of(Logs(second, logs=rank == 1))]

    run = merged(runs)

    logging = [record for record in run.trace.records if record.op == "aten.sum.default"]
    assert [record.module for record in logging] == [f"{'rank 1: ' * rank}Logs"]
    assert len([node for node in run.graph if not node.op and node.kind is Kind.CONSTANT]) == 2
    known = set()
    for node in run.graph:
        assert {*node.reads} <= known, node  # in the order of calls
        known.add(node.id)
    assert run.graph.nodes[run.graph.results["output"]].numel == 5 * 6


def test_results_are_put_together_along_the_dimension_of_the_other_side() -> None:
    _, first, second = linears()
    run = merged([run_of(first), run_of(second)])

    whole = torch.cat([run.parts[0]["output"], run.parts[1]["output"]], 1)
    assert torch.equal(fitted(run, {"o": torch.empty(5, 6)}, {"output": "o"}).results["output"], whole)
    assert torch.equal(fitted(run, {"o": torch.empty(5, 3)}, {"output": "o"}).results["output"], run.parts[0]["output"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    whole, *_ = linears()
    run = replace(run_of(whole), values={"forward/x": torch.randn(2, 3).to(dtype)})

    write_run(run, tmp_path / "run")
    again = read_run(tmp_path / "run")

    assert again.graph == run.graph
    assert again.trace.records == run.trace.records
    assert (again.outputs, again.digests, again.fallbacks) == (run.outputs, run.digests, run.fallbacks)
    assert torch.equal(again.values["forward/x"], run.values["forward/x"])
    assert torch.equal(again.results["output"], run.results["output"])
    rows = [(node.rows, again.graph.nodes[node.id].rows) for node in run.graph if node.rows is not None]
    assert rows
    assert all((ours == theirs).all() for ours, theirs in rows)


@pytest.mark.parametrize("make", [lambda: blocks.one(), partial(lambda: 1)], ids=["lambda", "partial of one"])
def test_functions_without_a_name_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(HashbenchError, match="cannot be sent to other processes") as raised:
        recorded(beside(make), 1, wide=True)

    assert "RANKS_B" in raised.value.tip


@pytest.mark.parametrize("ranks", ["0", "'two'", "2.0"])
def test_a_number_of_ranks_that_is_none_is_refused(tmp_path: Path, ranks: str) -> None:
    path = tmp_path / "pair.py"
    path.write_text(f"RANKS_B = {ranks}\ndef make_a(): pass\nmake_b = inputs = make_a\n", encoding="utf-8")

    with pytest.raises(HashbenchError, match="its RANKS_B is"):
        read_side(str(path), "b", None)
