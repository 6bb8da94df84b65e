"""The text form of a trace: it comes back as it was, whatever is in it, and a file that was touched is refused."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import damaged, every_damage, readings
from hypothesis import given
from hypothesis import strategies as st

from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_text
from hashbench.core.records import (
    Collective,
    EarlyRead,
    Leaf,
    OpRecord,
    Ref,
    Result,
    SettingsMark,
    TensorDigest,
    Trace,
    TracedRank,
    TracedStep,
    contiguous_stride,
)
from hashbench.core.trace import file

NASTY = ["", "a", "; ", ";", "\t; x", "a b", "a\tb", "a\nb", "a\r\nb", "\\", "\\n", "\x0c", "\x1c", "\x85", "\u2028"]
NASTY += ["é", "日", "=", ":", "+3", "!", "x=y:z+1!", "->", "end\t3", "#0", "blank", "\xa0", "[0]", "{1}", "@2"]
NASTY += ["Net.layer1"]


class Writer:
    """Draws traces from everything that a trace may hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def text(self) -> str:
        return "".join(self.rng.choice(NASTY) for _ in range(self.rng.randrange(4)))

    def hexadecimal(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def digest(self, *, blank: bool = False) -> TensorDigest:
        shape = tuple(self.rng.randrange(4) for _ in range(self.rng.randrange(4)))
        stride = contiguous_stride(shape) if self.rng.random() < 0.5 else tuple(self.rng.randrange(9) for _ in shape)
        return TensorDigest("float32", shape, stride, "" if blank else self.rng.choice([self.hexadecimal(), "meta"]))

    def reference(self, sources: list[str]) -> Ref:
        offset, written = self.rng.choice([0, 0, 7]), self.rng.random() < 0.3
        argument = self.rng.choice(["0", "1.2", "src", "out"])
        place = argument, self.rng.choice(sources), offset, written
        layouts = ("", "[]", "[3]", "[2,3]{1,2}")
        return Ref(*place, *self.rng.choice([("", ""), (self.hexadecimal(), self.rng.choice(layouts))]))

    def leaf(self, number: int, position: int) -> Leaf:
        name = f"other/{self.text()}#{number}"
        return Leaf(name, "other", self.digest(), position, self.rng.choice(["", self.hexadecimal()]))

    def record(self, number: int, sources: list[str]) -> OpRecord:
        module, op, blank = self.text(), f"aten.op{self.rng.randrange(3)}.default", self.rng.random() < 0.2
        return OpRecord(
            id=f"forward.1/{module}/{op}#{number}",
            phase="forward",
            iteration=1,
            module=module,
            op=op,
            inputs=tuple(self.reference(sources) for _ in range(self.rng.randrange(3)) if sources),
            arguments=self.text(),
            outputs=tuple(self.digest(blank=blank) for _ in range(self.rng.randrange(int(blank), 3))),
            scalar=self.text(),
            rng=self.rng.choice(["", self.hexadecimal()]),
            forward_op=self.text(),
            source=self.text(),
            collective=self.collective() if self.rng.random() < 0.3 else None,
        )

    def collective(self) -> Collective:
        ranks = tuple(self.rng.sample(range(9), self.rng.randrange(4)))
        given = tuple(self.rng.sample(["0", "1.2", "input"], self.rng.randrange(3)))
        root, peer = (self.rng.choice([None, 0, 7]) for _ in range(2))
        kind = self.rng.choice(["", "reduce", "message"])
        return Collective(kind, ranks, self.rng.randrange(2), given, root, peer, self.rng.choice([0, 5]))

    def results(self, sources: list[str]) -> tuple[Result, ...]:
        return tuple(
            Result(
                f"{number}{self.text()}",
                self.digest(),
                self.rng.choice(["", *sources]),
                self.text(),
                tuple(self.rng.sample(range(9), self.rng.randrange(3))),
            )
            for number in range(2)
        )

    def trace(self) -> Trace:
        records: list[OpRecord] = []
        leaves: list[Leaf] = []
        marks: list[SettingsMark] = []
        steps: list[TracedStep] = []
        for number in range(self.rng.randrange(8)):
            if self.rng.random() < 0.2:
                written = [record.id for record in records]
                steps.append(TracedStep(len(steps) + 3, len(records), self.results(written)))
            if self.rng.random() < 0.5:
                leaves.append(self.leaf(number, len(records)))
            if self.rng.random() < 0.3:
                settings = {name: self.text() for name in self.rng.sample(["threads", "dtype", "a b"], 2)}
                marks.append(SettingsMark(len(records), self.text(), tuple(sorted(settings.items()))))
            record = self.record(number, [*(leaf.id for leaf in leaves), *(record.id for record in records)])
            blank = any(not found.value for found in record.outputs)
            records.append(dataclasses.replace(record, blank=blank))
        results = list(self.results([record.id for record in records]))
        results.append(Result("python", TensorDigest("str", (), (), repr(self.text())), ""))
        tracer = self.rng.choice(["native", "python"])
        early = [
            EarlyRead(self.rng.choice(records).id, self.rng.choice(readers), self.text(), is_result=is_result)
            for is_result, readers in ((False, [r.id for r in records]), (True, [result.name for result in results]))
            if records
        ]
        return Trace(
            *(tuple(records), tuple(leaves), tuple(results), tuple(marks)),
            *(self.rng.random() < 0.5, tracer, self.text()),
            early_reads=tuple(early),
            rank=TracedRank(self.rng.randrange(3), 3, self.text()) if steps or self.rng.random() < 0.3 else None,
            steps=tuple(steps),
        )


def small_trace() -> Trace:
    digest = TensorDigest("float32", (2, 3), (3, 1), "0123456789abcdef")
    leaf = Leaf("input/0", "input", digest, 0)
    relu = OpRecord("forward.0/Nét/aten.relu.default#0", "forward", 0, "Nét", "aten.relu.default")
    relu = dataclasses.replace(relu, inputs=(Ref("0", "input/0"),), outputs=(digest,))
    mark = SettingsMark(0, "start", (("threads", "2"),))
    return Trace((relu,), (leaf,), (Result("output", digest, relu.id),), (mark,))


TRACES = st.randoms(use_true_random=True).map(lambda rng: Writer(rng).trace())


@given(trace=TRACES, note=st.sampled_from(["time=1.5", "a\tb\nc", "; x", "rng=forged"]))
def test_trace_comes_back_as_it_was_without_its_notes(trace: Trace, note: str, tmp_path: Path) -> None:
    text = file.dumps(trace, notes=dict.fromkeys(range(len(trace.records)), note))
    assert len(text) >= len(file.dumps(trace)) + len(trace.records) * len(note)
    assert file.loads(text) == file.loads(file.dumps(trace)) == trace
    file.write(trace, tmp_path / "a.gz")
    assert file.read(tmp_path / "a.gz") == trace
    for kind, written in (("op", trace.records), ("leaf", trace.leaves)):
        assert sum(line.startswith(f"{kind}\t") for line in text.split("\n")) == len(written)


def test_files_that_are_read_together_are_read_as_each_by_itself_and_share_equal_records() -> None:
    parsed = file.ParsedRecords()

    @given(TRACES)
    def read(trace: Trace) -> None:
        found = file.loads(file.dumps(trace), parsed=parsed)
        assert found == trace
        again = file.loads(file.dumps(dataclasses.replace(trace, results=(), early_reads=())), parsed=parsed)
        assert all(a is b for a, b in zip(found.records, again.records, strict=True))

    read()


@pytest.mark.parametrize("head", ["plain", "hashed-inputs"])
def test_a_file_that_names_no_tracer_is_of_the_dispatch_mode(head: str) -> None:
    text = file.dumps(small_trace()).replace("\tplain\ttracer=python\n", f"\t{head}\n")
    expected = dataclasses.replace(small_trace(), hashed_inputs=head == "hashed-inputs")
    assert file.loads(resealed(text)) == expected


@pytest.mark.parametrize("name", ["a.log", "a.gz"])
def test_every_cut_and_every_changed_byte_is_refused(name: str, tmp_path: Path) -> None:
    path, trace = tmp_path / name, small_trace()
    file.write(trace, path)
    read = [found for _, found in readings(path, every_damage(path.read_bytes()), file.read) if found is not None]
    assert len(read) < (30 if name.endswith("gz") else 1)  # bits of gzip's header that say nothing
    assert all(found == trace for found in read)


CHANGED: dict[str, tuple[Callable[[str], str], str]] = {
    "an empty file": (lambda _: "", "it is not a hashbench trace"),
    "a line added": (lambda text: text + "\n", "it is damaged"),
    "two traces in one file": (lambda text: text + text, "it is damaged"),
    "other line ends": (lambda text: text.replace("\n", "\r\n"), "cannot read the trace"),
    "another version": (lambda text: text.replace("trace\t1", "trace\t2"), "schema version 2, this hashbench reads 1"),
    "a line removed": (lambda text: "\n".join(text.split("\n")[:2] + text.split("\n")[3:]), "it is damaged"),
    "a byte order mark": (lambda text: "\ufeff" + text, "it is not a hashbench trace"),
}


@pytest.mark.parametrize(("change", "words"), CHANGED.values(), ids=CHANGED)
def test_changed_file_is_refused(change: Callable[[str], str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(change(file.dumps(small_trace())), encoding="utf-8", newline="")
    with pytest.raises(HashbenchError, match=words):
        file.read(path)


def resealed(text: str) -> str:
    """The text with a closing line that fits it, as somebody who edits traces by hand would make it."""
    body = text[: text.rindex("end\t")]
    return f"{body}end\t{body.count(chr(10))}\t{file._checksum(body)}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("0=input/0", "0=input/1", id="a reference to nothing"),
        pytest.param("op\t", "what\t", id="an unknown kind of line"),
        pytest.param("[2,3]", "[2,x]", id="a shape that is none"),
        pytest.param("forward.0/", "forward.x/", id="an iteration that is none"),
        pytest.param("tracer=python", "tracer=other", id="a tracer that is none"),
        pytest.param("end\t", "early\tinput/0\top\tnobody\t\nend\t", id="an early read by nobody"),
    ],
)
def test_unparsable_line_with_valid_checksum_is_refused(old: str, new: str) -> None:
    with pytest.raises(HashbenchError, match="cannot be parsed"):
        file.loads(resealed(file.dumps(small_trace()).replace(old, new)))


@pytest.mark.slow
def test_hostile_file_with_a_fitting_checksum_is_refused_in_one_line_or_read(tmp_path: Path) -> None:
    """Whatever a sender writes: no other error, nothing executed, no long wait."""
    content = file.dumps(small_trace()).encode()
    bad = [
        (name, resealed(hostile.decode(errors="replace").rpartition("end\t")[0] + "end\t").encode())
        for name, hostile in damaged(content, seed=3, flips=400, cuts=40)
    ]
    assert sum(found is None for _, found in readings(tmp_path / "a.log", bad, file.read)) > 50


def test_missing_file_refused_and_no_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace"
    with pytest.raises(HashbenchError, match="No such file"):
        file.read(path)
    file.write(small_trace(), path)
    file.write(small_trace(), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["trace"]
    assert file.read(path) == small_trace()


# ------------------------------------------------------------------------------------------------------- whole steps


def stepped_trace() -> Trace:
    """Two whole steps and what comes after them."""
    digest, trace = TensorDigest("float32", (2, 3), (3, 1), "0123456789abcdef"), small_trace()
    records = [
        dataclasses.replace(trace.records[0], id=f"forward.{number}//aten.relu.default#0") for number in range(3)
    ]
    records = [dataclasses.replace(record, module="", iteration=at) for at, record in enumerate(records)]
    results = [(Result("weight", digest._replace(value=f"{number:016x}"), records[number].id),) for number in range(3)]
    steps = (TracedStep(5, 1, results[0]), TracedStep(6, 2, results[1]))
    rank = TracedRank(1, 2)
    return dataclasses.replace(trace, records=tuple(records), results=results[2], steps=steps, rank=rank)


def cut_to(trace: Trace, steps: int) -> Trace:
    """The trace as it was after some of its steps."""
    last = trace.steps[steps - 1]
    assert trace.rank is not None
    return dataclasses.replace(
        trace,
        records=trace.records[: last.position],
        results=last.results,
        steps=trace.steps[:steps],
        rank=dataclasses.replace(trace.rank, ended=file.CUT),
    )


def in_members(trace: Trace) -> tuple[bytes, list[int]]:
    """The content of a file that has a member for each step, and where each of them ends."""
    text = file.dumps(trace)
    closings = [text.index("\n", text.index(f"\nstep\t{step.number}\t") + 1) + 1 for step in trace.steps]
    parts = [text[start:end] for start, end in zip([0, *closings], [*closings, len(text)], strict=True)]
    content, ends = b"", []
    for part in parts:
        content += gzip.compress(part.encode(), mtime=0)
        ends.append(len(content))
    return content, ends


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    trace = stepped_trace()
    assert file.loads(file.dumps(trace)) == trace
    (tmp_path / "a.gz").write_bytes(in_members(trace)[0])
    assert file.read(tmp_path / "a.gz") == file.read(tmp_path / "a.gz", cut=True) == trace


@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
def test_steps_cut_anywhere_end_with_the_last_whole_one(packed: bool, tmp_path: Path) -> None:
    trace, path = stepped_trace(), tmp_path / "a"
    content, ends = in_members(trace)
    if not packed:
        content = file.dumps(trace).encode()
        ends = [content.index(b"\n", content.index(b"\nstep\t%d\t" % step.number) + 1) + 1 for step in trace.steps]
    cuts = [(str(length), content[:length]) for length in range(len(content))]
    assert all(found is None for _, found in readings(path, cuts, file.read))
    for length, found in readings(path, cuts, functools.partial(file.read, cut=True)):
        whole = sum(end <= int(length) for end in ends[:2])
        assert found == (cut_to(trace, whole) if whole else None)


@pytest.mark.parametrize("tail", [b"garbage", bytes(99), b"\x1f\x8b\x08", b"\n"], ids=repr)
def test_garbage_behind_whole_steps_is_left_out(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    content, ends = in_members(stepped_trace())
    path.write_bytes(content[: ends[1]] + tail)
    assert file.read(path, cut=True) == cut_to(stepped_trace(), 2)
    path.write_bytes(content + tail)
    with pytest.raises(HashbenchError, match=r"damaged|truncated"):
        file.read(path)


def test_step_that_was_changed_ends_what_is_read() -> None:
    text = file.dumps(stepped_trace())
    changed = text.replace("\tweight\t", "\twaight\t")
    with pytest.raises(HashbenchError, match="no whole step"):
        file.loads(changed, cut=True)
    first, second = (text.index(f"\nstep\t{number}") for number in (5, 6))
    changed = text[:first] + text[first:second].replace("relu", "tanh") + text[second:]
    assert file.loads(changed, cut=True) == cut_to(stepped_trace(), 1)
    swapped = text.replace("step\t5\t", "step\t4\t")
    with pytest.raises(HashbenchError, match="checksum mismatch"):
        file.loads(swapped)


def test_contributions_of_older_files_are_read() -> None:
    assert file._parse_collective("combine group=0,1 given=0.0") == Collective("combine", (0, 1), 0, ("0.0",))


def test_trace_without_steps_is_never_read_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    file.write(small_trace(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(HashbenchError, match="not a hashbench trace"):
        file.read(path, cut=True)


@pytest.mark.slow
def test_damaged_file_of_steps_has_no_step_that_is_not_the_writers(tmp_path: Path) -> None:
    trace = stepped_trace()
    true = [trace, cut_to(trace, 1), cut_to(trace, 2), None]
    bad = damaged(in_members(trace)[0], seed=8, flips=500, cuts=40)
    found = [true.index(read) for _, read in readings(tmp_path / "a.gz", bad, functools.partial(file.read, cut=True))]
    assert set(found) == {0, 1, 2, 3}


def test_digests_that_arrived_later_take_their_place() -> None:
    trace = stepped_trace()
    came = trace.records[0].outputs
    pending = tuple(digest._replace(value="pending") for digest in came)
    exchanged = dataclasses.replace(trace.records[0], collective=Collective("reduce"), outputs=pending)
    text = file.TraceText(trace)
    parts = [dataclasses.replace(trace, records=(exchanged,), steps=(), marks=(), results=())]
    parts.append(dataclasses.replace(parts[0], leaves=(), records=trace.records[1:]))
    text.add(parts[0])
    text.close_step(5, trace.steps[0].results)
    text.add(parts[1], first=1, arrived={exchanged.id: came})
    text.end(trace.results)
    read = file.loads(text.taken())
    assert read.records == (dataclasses.replace(exchanged, outputs=came), *trace.records[1:])
    assert read.steps == trace.steps[:1]


def test_what_is_dropped_leaves_a_whole_text() -> None:
    trace = stepped_trace()
    text = file.TraceText(trace)
    text.add(dataclasses.replace(trace, records=trace.records[:1], steps=(), marks=()))
    text.close_step(5, trace.steps[0].results)
    kept = text.taken()
    text.add(dataclasses.replace(trace, records=trace.records[1:2], steps=(), marks=(), leaves=()), first=1)
    text.close_step(6, ())
    text.lines.drop()
    text.end((), ended="no room")
    read = file.loads(kept + text.taken())
    assert (read.records, read.steps, read.results) == (trace.records[:1], trace.steps[:1], trace.steps[0].results)
    assert read.rank == TracedRank(1, 2, "no room")


def test_many_small_members_are_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"", mtime=0) * 50_000 + in_members(stepped_trace())[0])
    assert file.read(path) == stepped_trace()
    with pytest.raises(ValueError, match="data follow"):
        read_text(path)


# ------------------------------------------------------------------------------------------------------------- gzip


def test_gz_file_holds_the_same_text(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.log", tmp_path / "a.log.gz"
    file.write(small_trace(), plain, notes={0: "a note"})
    file.write(small_trace(), packed, notes={0: "a note"})
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert file.read(packed) == file.read(plain) == small_trace()
    assert file.text_size(packed) == file.text_size(plain) == plain.stat().st_size


def test_gz_bytes_are_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(small_trace(), tmp_path / "a.gz")
    monkeypatch.setattr("time.time", lambda: 1e9)
    file.write(small_trace(), tmp_path / "b.gz")
    first = (tmp_path / "a.gz").read_bytes()
    assert first == (tmp_path / "b.gz").read_bytes()
    assert first[3:8] == bytes(5)  # no file name, no time


def test_compression_is_recognized_by_content(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_text(file.dumps(small_trace()))
    (tmp_path / "packed.log").write_bytes(gzip.compress(file.dumps(small_trace()).encode()))
    assert file.read(tmp_path / "plain.gz") == file.read(tmp_path / "packed.log") == small_trace()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_limit_is_inclusive(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("a.gz" if packed else "a.log")
    file.write(small_trace(), path)
    size = len(file.dumps(small_trace()).encode())
    assert file.read(path, most=size) == small_trace()
    with pytest.raises(HashbenchError, match="has more than"):
        file.read(path, most=size - 1)


def test_written_marker_does_not_read_as_unequal() -> None:
    record = OpRecord("forward.0//aten.relu_.default#0", "forward", 0, "", "aten.relu_.default")
    record = dataclasses.replace(record, inputs=(Ref("0", "input/", written=True, digest="a057271c9071c99d"),))
    line = file.record_line(record, {"input/": file.writer_text("input/", "a057271c")})
    assert "0=input/:a057271c!@a057271c9071c99d" in line
    assert "!=" not in line


def test_ids_without_a_count_or_with_a_slash_behind_it_keep_their_places() -> None:
    parsed = file.ParsedRecords()
    for where, op in (("forward.1/A", "x.y"), ("backward/B", "z"), ("forward.1/A", "x.y#0/w"), ("optimizer/", "z#1")):
        record = parsed.of("\t".join(["op", f"{where}/{op}", "", "", "->"]))
        module = f"{where}/{op}".partition("/")[2].rpartition("/")[0]
        assert (record.id, record.module) == (f"{where}/{op}", module)
