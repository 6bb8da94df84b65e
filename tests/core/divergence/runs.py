"""Traces of two runs from a few lines of text.

A line is an op; ``left|right`` is that of the first and of the second run, and so is a line after ``1:`` or ``2:``.

``y = add_ !x+4@h input/0=c (0.5) -> a*8,b rng=g``: the op ``add_`` reads ``x``, which it also writes (``!``), at offset
4, when its hash is ``h``; the leaf ``input/0``, whose content is ``c`` (default: ``w``); and the
number 0.5. It writes a tensor of 8 elements with content ``a`` and one of 4 with ``b``. ``out=!x`` is an argument with
a name, ``1.0=x`` one in a list; ``=>`` writes what is also a result, ``v~2`` has stride 2, ``int32:v`` another dtype,
and ``blank`` is uninitialised memory; ``group=0-1`` are the ranks of a ``c10d`` op. An op that writes nothing is a
view. Other lines: a leaf, ``was=`` its initial content; ``mark label setting=value``; ``result x content as name``;
``hashed``: inputs are hashed; ``@h[2-3]{1-2}`` is one of this shape and stride.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from hashbench.core.divergence import find
from hashbench.core.records import Collective, Leaf, OpRecord, Ref, Result, SettingsMark, TensorDigest, Trace, Verdict
from hashbench.core.trace.collective_ops import COLLECTIVE_OPS, UNKNOWN

FIELDS = ("rng", "scalar", "module", "phase", "forward_op", "source", "in", "thread", "group", "opaque")


EITHER = re.compile(r"([^\s|=@+,*:~!]*)\|([^\s|=@+,*:~!]*)")


READ = re.compile(r"(?:([\w.]+)=)?(!?)([^=+@]+)(?:=([^+@]*))?(?:\+(\d+))?(?:@([^\[]*)(\[.*)?)?")


WROTE = re.compile(r"(?:(\w+):)?([^~*]+)(?:~(\d+))?(?:\*(\d+))?")


def tensor(text: str) -> TensorDigest:
    """What was written, as the table says it."""
    match = WROTE.fullmatch(text)
    assert match is not None, text
    dtype, content, stride, size = match.groups()
    return TensorDigest(
        dtype or "float32", (int(size or 4),), (int(stride or 1),), "" if content == "blank" else content
    )


def full(name: str) -> str:
    if name == "nothing":
        return ""
    return name if "." in name else f"aten.{name}.default"


class Run:
    """One of the two runs: lines of the table become its trace."""

    def __init__(self, lines: str = "", *, second: bool = False) -> None:
        self.second, self.hashed = second, False
        self.records: list[OpRecord] = []
        self.leaves: list[Leaf] = []
        self.results: list[Result] = []
        self.marks: list[SettingsMark] = []
        self.nodes: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        for line in lines.splitlines():
            self.write(line.strip())

    def write(self, line: str) -> None:
        """Add what a line says."""
        only, _, line = line.rpartition(": ")
        if only not in ("", "2" if self.second else "1"):
            return
        arguments = re.search(r" \((.*?)\)", line)
        if arguments is not None:
            line = line.replace(arguments[0], "")
        name, _, line = EITHER.sub(r"\2" if self.second else r"\1", line).rpartition(" = ")
        match line.split():
            case ["hashed"]:
                self.hashed = True
            case ["mark", label, *settings]:
                pairs = sorted(setting.split("=") for setting in settings)
                self.marks.append(SettingsMark(len(self.records), label, tuple((key, value) for key, value in pairs)))
            case ["result", "python", value]:
                self.results.append(Result("output", TensorDigest("int", (), (), value)))
            case ["result", written, content, *named]:
                self.results.append(Result((*named, "output")[1 if named else 0], tensor(content), self.nodes[written]))
            case [leaf, *was] if "/" in leaf:
                self._leaf(*leaf.split("="), "".join(was).removeprefix("was="))
            case [op, *words]:
                values = (arguments[1] if arguments is not None else "").split(" | ")
                self.nodes[name] = self._op(full(op), words, values[-1 if self.second else 0])

    def _leaf(self, name: str, content: str = "w", initial: str = "") -> None:
        self.nodes[name] = name
        self.leaves.append(Leaf(name, name.partition("/")[0], tensor(content), len(self.records), initial))

    def _op(self, op: str, words: list[str], arguments: str) -> str:
        fields: dict[str, Any] = {"phase": "forward", "module": "Net"}
        fields |= {key: value for key, _, value in (word.partition("=") for word in words) if key in FIELDS}
        if "in" in fields:  # before the op that it is in
            fields["inside"] = f"forward.0/Net/{full(fields.pop('in'))}#0"
        words = [word for word in words if word.partition("=")[0] not in FIELDS]
        arrow = next((word for word in words if word in ("->", "=>")), "")
        outputs = tuple(map(tensor, words[-1].split(","))) if arrow else ()
        inputs = tuple(self._read(*item) for item in enumerate(words[: words.index(arrow)] if arrow else words))
        thread = f"{fields.pop('thread')}." if "thread" in fields else ""
        stem = f"{fields['phase']}.0/{fields['module']}/{op}#{thread}"
        node = f"{stem}{self.counts[stem]}"
        self.counts[stem] += 1
        group = tuple(map(int, fields.pop("group", "").split("-"))) if "group" in fields else ()
        fields |= {"arguments": arguments, "blank": any(not output.value for output in outputs)}
        record = OpRecord(node, iteration=0, op=op, inputs=inputs, outputs=outputs, **fields)
        self.records.append(replace(record, collective=_collective(record, group)))
        if arrow == "=>":
            self.results.append(Result("output", outputs[0], node))
        return node

    def _read(self, position: int, word: str) -> Ref:
        match = READ.fullmatch(word)
        assert match is not None, word
        argument, written, name, content, offset, digest, layout = match.groups()
        if "/" in name and name not in self.nodes:
            self._leaf(name, content or "w")
        return Ref(
            argument or str(position), self.nodes[name], int(offset or 0), bool(written), digest or "", layout or ""
        )

    def trace(self) -> Trace:
        return Trace(tuple(self.records), tuple(self.leaves), tuple(self.results), tuple(self.marks), self.hashed)


def _collective(record: OpRecord, group: tuple[int, ...]) -> Collective | None:
    """What an op of ``c10d`` exchanges: it gives what it does not only receive into."""
    if not record.op.startswith("c10d."):
        return None
    line = COLLECTIVE_OPS.get(record.op.removesuffix(".default").replace(".", "::"))
    if line is None:
        return Collective(UNKNOWN, group)
    in_place = {*line.contributed} == {*line.written}
    given = tuple(ref.argument for ref in record.inputs if line.contributed and (in_place or not ref.written))
    return Collective(line.kind, group, contributed=given)


def judge(lines: str, *, swapped: bool = False) -> Verdict:
    """The verdict on the two runs of some lines; ``swapped`` takes the second run as the first."""
    return find(Run(lines, second=swapped).trace(), Run(lines, second=not swapped).trace())
