"""Settle groups of tensors that share lines: they hold the same, or what of them differs. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hashbench.core.text import count
from hashbench.extensions.implementations.digest import matrices
from hashbench.extensions.implementations.lines import AXES, Line, LineGroup, group_of, grouped
from hashbench.extensions.implementations.located import ComparedElements, compare_lines
from hashbench.extensions.implementations.names import split
from hashbench.extensions.implementations.pool import Level, Pool
from hashbench.extensions.implementations.verdict import Kind, Names, WeightsDifference, WeightsMatch


@dataclass(frozen=True, slots=True)
class Settled:
    """What was found of some tensors, all of which were taken.

    Attributes:
        matches, differences: what they hold.
        orders_a, orders_b: name of a fused tensor of a side -> its parts on the other side, in order.
    """

    matches: tuple[WeightsMatch, ...] = ()
    differences: tuple[WeightsDifference, ...] = ()
    orders_a: dict[str, tuple[str, ...]] = field(default_factory=dict)
    orders_b: dict[str, tuple[str, ...]] = field(default_factory=dict)


def difference_of(one: str, other: str, compared: ComparedElements) -> WeightsDifference:
    """Return what elements that differ mean."""
    side = "" if not compared.through else compared.rounded_side
    text = (
        f"{side} holds the values of {'a' if side == 'b' else 'b'} rounded through {compared.through}" if side else ""
    )
    return WeightsDifference(
        kind="narrowed" if side else "changed",
        a=(one,),
        b=(other,),
        text=text,
        differing=compared.differing,
        total=compared.total,
        first_a=compared.first_a,
        first_b=compared.first_b,
        value_a=compared.value_a,
        value_b=compared.value_b,
    )


def settle_groups(a: Pool, b: Pool, level: Level) -> Iterator[Settled]:
    """Take the tensors that share rows or columns with tensors of the other side, group by group."""
    names_a, names_b = a.with_lines(level.a), b.with_lines(level.b)
    if level.rounded:
        through = {name: a.went_through(name, level.common) for name in names_a}
        names_b = [name for name in names_b if b.went_through(name, level.common) not in {*through.values()}]
    if not names_a or not names_b:
        return
    lines_a = {name: a.lines(name, level.common) for name in names_a}
    lines_b = {name: b.lines(name, level.common) for name in names_b}
    found = grouped(lines_a, lines_b)
    fillers_a = _Fillers(a, level.a, {name for names, _ in found for name in names})
    fillers_b = _Fillers(b, level.b, {name for _, names in found for name in names})
    for sides in found:
        yield _settled(a, b, level, group_of(sides, lines_a, lines_b), fillers_a, fillers_b)


@dataclass(frozen=True, slots=True)
class _Fillers:
    """Tensors of one side that may be what lines of the other side lack: of this dtype, and not among the ``busy``."""

    pool: Pool
    dtype: str
    busy: set[str]

    def lines(self, group: LineGroup, axes: dict[str, str], left: Sequence[Line]) -> list[Line]:
        """Return the lines of whole tensors that together are as many as those that are ``left`` on the other side, and
        add the axes of these tensors; none if none fit. Those that share the numbers of the group come first."""
        if not left:
            return []
        usual, numbers = next((axis, split(name)[1]) for name, axis in axes.items())
        fitting = []
        for name in self.pool.left:
            shape = matrices(self.pool.tensors.headers[name].shape)
            if name in self.busy or self.pool.dtype(name) != self.dtype or shape[:2] == (1, 1):
                continue
            lengths = {"rows": shape[2], "columns": shape[1]}
            sizes = {"rows": shape[0] * shape[1], "columns": shape[0] * shape[2]}
            along = [axis for axis in (usual, *AXES) if lengths[axis] == group.length]
            if along and sizes[along[0]] <= len(left):
                fitting.append((name, along[0], sizes[along[0]]))
        near = [each for each in fitting if split(each[0])[1][:1] == numbers[:1]]
        chosen = _adding_up(near, len(left)) or (_adding_up(fitting, len(left)) if len(fitting) == 1 else [])
        axes.update({name: axis for name, axis, _ in chosen})
        return [Line(name, number) for name, _, size in chosen for number in range(size)]


def _settled(a: Pool, b: Pool, level: Level, group: LineGroup, fillers_a: _Fillers, fillers_b: _Fillers) -> Settled:
    axes_a, axes_b = dict(group.a), dict(group.b)
    unequal = [*_opposite(group)]
    left_a, left_b = _without(group, unequal)
    unequal += zip(fillers_a.lines(group, axes_a, left_b), left_b, strict=False)
    unequal += zip(left_a, fillers_b.lines(group, axes_b, left_a), strict=False)
    left_a, left_b = _without(group, unequal)
    if len(left_a) == len(left_b):
        unequal += zip(left_a, left_b, strict=True)
    left_a, left_b = _without(group, unequal)
    differences = [*_compared(a, b, level, axes_a, axes_b, group, unequal)]
    differences += _extra("a", left_a, axes_a, group)
    differences += _extra("b", left_b, axes_b, group)
    names_a, names_b = a.take(axes_a), b.take(axes_b)
    pairs = (*group.pairs, *unequal)
    whole = LineGroup(axes_a, axes_b, group.length, pairs)
    orders_a = {name: whole.parts_of(name) for name in axes_a}
    orders_b = {name: whole.parts_of(name) for name in axes_b}
    match = WeightsMatch(
        kind=_kind(axes_a, axes_b),
        a=_in_order(names_a, orders_b),
        b=_in_order(names_b, orders_a),
        how=_how(group),
        cast=level.cast,
    )
    return Settled(
        () if differences else (match,),
        tuple(differences),
        {name: parts for name, parts in orders_a.items() if len(parts) > 1},
        {name: parts for name, parts in orders_b.items() if len(parts) > 1},
    )


def _in_order(names: Names, orders: dict[str, Names]) -> Names:
    """Return names in the order in which they first stand in the tensors of the other side."""
    return tuple(dict.fromkeys((*(name for parts in orders.values() for name in parts), *names)))


def _kind(a: dict[str, str], b: dict[str, str]) -> Kind:
    if len(a) == len(b) == 1:
        return "same"
    return "fused" if len(b) == 1 else "cut" if len(a) == 1 else "regrouped"


def _how(group: LineGroup) -> str:
    lines = {*group.a.values()}.pop()
    words = ["transposed"] if group.is_turned else []
    if not group.in_order:
        words.append(f"{lines} interleaved" if len(group.a) + len(group.b) > 2 else f"{lines} permuted")
    for side, zeros, axes in (("a", group.zeros_a, group.a), ("b", group.zeros_b, group.b)):
        if zeros:
            words.append(f"{side} has {count(zeros, {*axes.values()}.pop()[:-1])} of zeros more")
    return ", ".join(words)


def _adding_up(tensors: Sequence[tuple[str, str, int]], wanted: int) -> list[tuple[str, str, int]]:
    exact = [each for each in tensors if each[2] == wanted]
    if exact:
        return exact[:1]
    return [*tensors] if sum(size for *_, size in tensors) == wanted else []


def _without(group: LineGroup, pairs: Sequence[tuple[Line, Line]]) -> tuple[list[Line], list[Line]]:
    """Return the lines without partner that are in none of these pairs."""
    told_a, told_b = {one for one, _ in pairs}, {other for _, other in pairs}
    return [line for line in group.left_a if line not in told_a], [line for line in group.left_b if line not in told_b]


def _opposite(group: LineGroup) -> Iterator[tuple[Line, Line]]:
    """Yield lines without partner that stand where one of the other side stands."""
    placed: defaultdict[str, dict[int, Line]] = defaultdict(dict)
    for one, other in group.pairs:
        placed[one.name][one.number] = other
    waiting = dict.fromkeys(group.left_b)
    for line in group.left_a:
        near = _near(placed[line.name], line.number)
        spot = next((each for each in near if each in waiting), None)
        if spot is not None:
            del waiting[spot]
            yield line, spot


def _near(placed: dict[int, Line], number: int) -> Iterator[Line]:
    """Yield where a line would stand, judged by the nearest one with a partner before it and behind it."""
    before = max((each for each in placed if each < number), default=None)
    behind = min((each for each in placed if each > number), default=None)
    for near in (before, behind):
        if near is not None:
            yield Line(placed[near].name, placed[near].number + number - near)


def _compared(
    a: Pool,
    b: Pool,
    level: Level,
    axes_a: dict[str, str],
    axes_b: dict[str, str],
    group: LineGroup,
    unequal: Sequence[tuple[Line, Line]],
) -> Iterator[WeightsDifference]:
    """Yield what differs in the lines that should be equal, by the two tensors that have them."""
    by_names: defaultdict[tuple[str, str], list[tuple[Line, Line]]] = defaultdict(list)
    for pair in unequal:
        by_names[pair[0].name, pair[1].name].append(pair)
    shared = Counter((one.name, other.name) for one, other in (*group.pairs, *unequal))
    for (one, other), pairs in by_names.items():
        compared = compare_lines(
            (a.tensors, a.lines(one, level.common), axes_a[one]),
            (b.tensors, b.lines(other, level.common), axes_b[other]),
            pairs,
        )
        if compared.differing:
            yield difference_of(one, other, replace(compared, total=shared[one, other] * group.length))


def _extra(side: str, left: Sequence[Line], axes: dict[str, str], group: LineGroup) -> Iterator[WeightsDifference]:
    """Yield the lines that one side alone has, tensor by tensor."""
    other = "b" if side == "a" else "a"
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for line in left:
        numbers[line.name].append(line.number)
    for name, lines in numbers.items():
        axis = axes[name]
        text = f"{other} lacks {count(len(lines), axis[:-1])} of it: {axis} {_ranges(lines)}"
        partners = tuple(group.b if side == "a" else group.a)
        ours, theirs = ((name,), partners) if side == "a" else (partners, (name,))
        yield WeightsDifference(kind="lines", a=ours, b=theirs, text=text)


def _ranges(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return f"{first} to {last}" if last > first else str(first)
    return f"{first} … {last}"
