"""Compare two compilations of a program by the sources of their kernels, and by the bits that these compute from equal
inputs. Pure; imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hashbench.core.divergence.align import align
from hashbench.core.inductor.wrapper import KernelSource
from hashbench.core.records import OpRecord
from hashbench.extensions.compiled.compiled_kernels import DIGITS, ListedKernel

_PYTHON = frozenset({"triton", "pallas", "cutedsl"})
"""Kinds of kernels whose source is Python."""

_STRING = r"""(?P<string>'''(?:\\.|[^\\])*?'''|\"""(?:\\.|[^\\])*?\"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_TOKENS = {
    True: re.compile(rf"(?P<comment>#[^\n]*)|{_STRING}", re.DOTALL),
    False: re.compile(rf"(?P<comment>//[^\n]*|/\*.*?\*/)|{_STRING}", re.DOTALL),
}
_PATH = re.compile(r"(?:/[\w.+@-]+)+/")
_NOTED = re.compile(r"^[ \t]*inductor_meta=\{.*\},?[ \t]*$", re.MULTILINE)
"""Settings of autotuning, counts of loads and stores, a hash of Triton: no part of the function."""


def source_digest(kernel: KernelSource) -> str:
    """Return the digest of a kernel's source, in hexadecimal digits.

    Independent of the kernel's name, of comments, white space at the ends of lines, the folders of absolute paths in
    strings, and what Inductor notes beside a Triton kernel for autotuning: kernels that compute the same way in
    compilations that number them differently have equal digests.
    """
    python = kernel.kind in _PYTHON
    own = re.compile(rf"(?<![^\W_]){re.escape(kernel.name)}(?!\d)")

    def plain(token: re.Match[str]) -> str:
        return _PATH.sub("", token["string"]) if token["string"] else "" if python else " "

    source = _NOTED.sub("", kernel.source) if python else kernel.source
    text = own.sub("kernel", _TOKENS[python].sub(plain, source))
    lines = [line.rstrip() if python else " ".join(line.split()) for line in text.splitlines()]
    plainest = "\n".join([kernel.kind, *filter(None, lines)])
    return hashlib.sha256(plainest.encode(errors="surrogatepass")).hexdigest()[: 2 * DIGITS]


@dataclass(frozen=True, slots=True)
class KernelPair:
    """The same kernel call in two compilations; ``None`` where one has none."""

    first: ListedKernel | None
    second: ListedKernel | None

    @property
    def shown(self) -> ListedKernel:
        """The call of the second compilation, else that of the first."""
        kernel = self.second or self.first
        if kernel is None:
            raise ValueError("a pair has a kernel on one side at least")
        return kernel

    @property
    def differs_by_source(self) -> bool:
        """True if a side has no such call, or one with another source."""
        return self.first is None or self.second is None or self.first.source != self.second.source

    @property
    def launches(self) -> str:
        """The two configurations of one Triton kernel, if they differ: ``XBLOCK 64, 1 warp, 1 stage against …``."""
        if self.first is None or self.second is None or self.differs_by_source:
            return ""
        first, second = self.first.launch, self.second.launch
        return f"{first} against {second}" if first and second and first != second else ""

    @property
    def what(self) -> str:
        """What differs, in words: ``another source``, ``different bits on equal inputs``, and the configurations."""
        if self.differs_by_source:
            return "another source"
        other = f"the same source, another configuration ({self.launches}), and " if self.launches else ""
        return f"{other}different bits on equal inputs"

    @property
    def same_inputs(self) -> bool:
        """True if both calls recorded what they wrote, and read equal content. Another source may have its arguments in
        another order."""
        first, second = self.first, self.second
        if first is None or second is None or not first.writes or not second.writes:
            return False
        return self._in_order(first.reads) == self._in_order(second.reads)

    @property
    def differs_by_bits(self) -> bool:
        """True if both calls read equal content and wrote different content."""
        if self.first is None or self.second is None or not self.same_inputs:
            return False
        return self._in_order(self.first.writes) != self._in_order(self.second.writes)

    def _in_order(self, digests: Sequence[str]) -> Sequence[str]:
        return sorted(digests) if self.differs_by_source else digests


@dataclass(frozen=True, slots=True)
class CompilationDifference:
    """What differs between two compilations.

    Attributes:
        by_source: calls whose kernel has another source, or that one compilation alone has, in order.
        by_bits: calls that read equal content and wrote different content, in order.
        first: the earliest call of both kinds; ``None`` if there is none.
        kernels: number of calls in the first and in the second compilation.
        matched: number of calls that are in both.
        same_inputs: of these, the number whose bits were compared: they read equal content.
    """

    by_source: tuple[KernelPair, ...]
    by_bits: tuple[KernelPair, ...]
    first: KernelPair | None
    kernels: tuple[int, int]
    matched: int
    same_inputs: int

    @property
    def equal(self) -> bool:
        """True if no kernel differs by source or by bits."""
        return self.first is None


def compare(
    first: Sequence[ListedKernel], second: Sequence[ListedKernel], *, cut: tuple[bool, bool] = (False, False)
) -> CompilationDifference:
    """Compare the kernel calls of two compilations of one program.

    Calls correspond when they compute the same aten ops in the same module, phase and graph, in order
    (:func:`hashbench.core.divergence.align.align`); without ops, when their kernels have the same name but for its
    number.

    Args:
        first: calls of the first compilation.
        second: those of the second.
        cut: for each side, whether it lacks its last calls: then calls of the other side behind the last pair are not
            judged.
    """
    aligned = align(_records(first), _records(second))
    pairs = [KernelPair(None if a is None else first[a], None if b is None else second[b]) for a, b in aligned]
    while pairs and ((cut[0] and pairs[-1].first is None) or (cut[1] and pairs[-1].second is None)):
        pairs.pop()
    return CompilationDifference(
        by_source=tuple(pair for pair in pairs if pair.differs_by_source),
        by_bits=tuple(pair for pair in pairs if pair.differs_by_bits),
        first=next((pair for pair in pairs if pair.differs_by_source or pair.differs_by_bits), None),
        kernels=(len(first), len(second)),
        matched=sum(pair.first is not None and pair.second is not None for pair in pairs),
        same_inputs=sum(pair.same_inputs for pair in pairs),
    )


_NUMBER = re.compile(r"_\d+$")


def _records(kernels: Sequence[ListedKernel]) -> list[OpRecord]:
    """Return the calls as records, whose ``op`` is what is computed."""
    counts: Counter[OpRecord] = Counter()
    records = []
    for kernel in kernels:
        op = " ".join(kernel.ops) or _NUMBER.sub("", kernel.name)
        record = OpRecord("", kernel.phase, kernel.graph, kernel.module, op)
        place = f"{kernel.phase}/{kernel.graph}/{kernel.module}/{op}#{counts[record]}"
        records.append(replace(record, id=place))
        counts[record] += 1
    return records
