"""Traces of two runs on several ranks, from a few lines of text: the language of ``tests.core.divergence.runs``, and
more.

``rank 1:`` begins the lines of a rank; those before the first are of every rank. An op of :data:`COLLECTIVES`
(``all_reduce !x -> s|S``) exchanges data: in the group of all ranks, or ``group=0-2``, ``ordinal=1``; ``root=1``,
``peer=0``, ``tag=3``. What it gives has the content that was last written to that name, or that after ``@``
(``@?``: it was not hashed).
``step`` ends a step: its results are those since the last one. ``ended WORDS`` is how the program ended, ``early OP``
an early read of what the last collective receives by the op ``OP`` that follows it, ``no trace`` drops a rank.
``replica p v as w 0-1`` is a result that ranks 0 and 1 must hold alike; without ranks nothing is known of it.
``beside p v as w 0-1`` is a plain one beside DTensors of these ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hashbench.core.records import BESIDE_DTENSORS, Collective, EarlyRead, Ref, Result, Trace, TracedRank, TracedStep
from tests.core.divergence.runs import Run, tensor

if TYPE_CHECKING:
    from hashbench.extensions.ranks.verdict import RanksVerdict

COLLECTIVES = {
    "all_reduce": ("c10d.allreduce_.default", "combine", "all"),
    "functional_all_reduce": ("_c10d_functional.all_reduce.default", "combine", "all"),
    "all_reduce_coalesced": ("c10d.allreduce_coalesced_.default", "combine", "all"),
    "reduce": ("c10d.reduce_.default", "combine", "all"),
    "reduce_scatter": ("c10d._reduce_scatter_base_.default", "reduce_scatter", "read"),
    "all_gather": ("c10d._allgather_base_.default", "gather", "read"),
    "gathered_matmul": ("symm_mem.fused_all_gather_matmul.default", "gather", "first"),
    "all_to_all": ("c10d.alltoall_base_.default", "all_to_all", "read"),
    "broadcast": ("c10d.broadcast_.default", "broadcast", "root"),
    "scatter": ("c10d.scatter_.default", "scatter", "root"),
    "send": ("c10d.send.default", "send", "all"),
    "recv": ("c10d.recv_.default", "receive", ""),
    "recv_any": ("c10d.recv_any_source_.default", "receive", ""),
    "barrier": ("c10d.barrier.default", "barrier", ""),
    "mystery": ("symm_mem.memcpy_to_multicast_.default", "unknown", ""),
}
"""Short name → op, kind, and what of its arguments a rank gives: those only read, the first, all, all on the root, or
none."""

WORDS = ("group", "ordinal", "root", "peer", "tag")


class RankRun(Run):
    """One of the two runs of a rank."""

    def __init__(self, rank: int, size: int, lines: str, *, second: bool) -> None:
        self.rank, self.size, self.ended, self.is_missing = rank, size, "", False
        self.contents: dict[str, str] = {}
        self.steps: list[TracedStep] = []
        self.since: list[Result] = []
        self.early: list[str] = []
        super().__init__(lines, second=second)

    def write(self, line: str) -> None:
        only, _, said = line.rpartition(": ")
        if only not in ("", "2" if self.second else "1"):
            return
        match said.split():
            case ["step"]:
                self.steps.append(TracedStep(len(self.steps), len(self.records), tuple(self.results)))
                self.since, self.results = self.results, []
            case ["ended", *words]:
                self.ended = " ".join(words)
            case ["no", "trace"]:
                self.is_missing = True
            case ["replica" | "beside", written, content, "as", name, *ranks]:
                replica = self._replica(written, content, name, ranks)
                beside = replace(replica, placement=BESIDE_DTENSORS)
                self.results.append(beside if said.startswith("beside") else replica)
            case ["early", op]:
                self.early.append(op)
            case _:
                super().write(line)
                self._note_content(said)

    def _replica(self, written: str, content: str, name: str, ranks: list[str]) -> Result:
        kept = tuple(map(int, ranks[0].split("-"))) if ranks else ()
        return Result(name, tensor(content), self.nodes[written], "DDP" if ranks else "", kept)

    def _note_content(self, line: str) -> None:
        name, _, rest = line.rpartition(" = ")
        if name and self.records and "/" not in name and rest:
            target = re.sub(r"([^\s|]*)\|([^\s|]*)", r"\2" if self.second else r"\1", name)
            if self.records[-1].outputs:
                self.contents[target] = self.records[-1].outputs[0].value

    def _op(self, op: str, words: list[str], arguments: str) -> str:
        short = op.removeprefix("aten.").removesuffix(".default")
        if short not in COLLECTIVES:
            return super()._op(op, words, arguments)
        full, kind, gives = COLLECTIVES[short]
        named = dict(word.split("=", 1) for word in words if word.partition("=")[0] in WORDS)
        node = super()._op(full, [word for word in words if word.partition("=")[0] not in WORDS], arguments)
        record = self.records[-1]
        root, peer = (int(named[name]) if name in named else None for name in ("root", "peer"))
        group = tuple(map(int, named["group"].split("-"))) if "group" in named else tuple(range(self.size))
        given = tuple(
            ref.argument
            for ref in record.inputs
            if ref.argument != "inside"
            and (
                gives == "all"
                or (gives == "first" and ref.argument == "0")
                or (gives == "read" and not ref.written)
                or (gives == "root" and root == self.rank)
            )
        )
        collective = Collective(kind, group, int(named.get("ordinal", 0)), given, root, peer, int(named.get("tag", 0)))
        inputs = tuple(self._hashed(ref) if ref.argument in given else ref for ref in record.inputs)
        self.records[-1] = replace(record, collective=collective, inputs=inputs)
        return node

    def _hashed(self, ref: Ref) -> Ref:
        names = [name for name, node in self.nodes.items() if node == ref.source]
        leaf = next((leaf.digest.value for leaf in self.leaves if leaf.id == ref.source), "")
        known = next((self.contents[name] for name in reversed(names) if name in self.contents), leaf)
        return ref._replace(digest="" if ref.digest == "?" else ref.digest or known)

    def trace(self) -> Trace:
        ids = [record.id for record in self.records]
        collectives = [record.id for record in self.records if record.collective is not None]
        early = tuple(
            EarlyRead(collectives[-1], next(one for one in reversed(ids) if f"aten.{op}." in one), "train.py:7 step")
            for op in self.early
        )
        return replace(
            super().trace(),
            results=tuple(self.results) or tuple(self.since),
            rank=TracedRank(self.rank, self.size, self.ended),
            steps=tuple(self.steps),
            early_reads=early,
        )


def rank_lines(text: str) -> Mapping[int, str]:
    """The lines of each rank."""
    common, *parts = re.split(r"^\s*rank (\d+):$", text, flags=re.M)
    return {int(rank): common + lines for rank, lines in zip(parts[::2], parts[1::2], strict=True)}


def rank_traces(text: str, *, second: bool = False) -> Mapping[int, Trace]:
    """The traces of one run by rank."""
    lines = rank_lines(text)
    runs = {rank: RankRun(rank, len(lines), one, second=second) for rank, one in lines.items()}
    return {rank: run.trace() for rank, run in runs.items() if not run.is_missing}


def judge_ranks(text: str, *, swapped: bool = False) -> RanksVerdict:
    """The verdict on the two runs of some lines; ``swapped`` takes the second run as the first."""
    from hashbench.extensions.ranks.find import find_across_ranks

    return find_across_ranks(rank_traces(text, second=swapped), rank_traces(text, second=not swapped))
