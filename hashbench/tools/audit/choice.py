"""What an audit looks at, within bounds: which samples of an op, which ops go to one process. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from hashbench.errors import HashbenchError

DTYPES = ("float32", "bfloat16", "complex64", "int64")
"""One of each class: the common one, a narrow one, a complex and a whole one."""

KNOWN_DTYPES = (*DTYPES, "float64", "float16", "complex128", "complex32", "bool", "int32", "int16", "int8", "uint8")


def chosen_samples(sizes: Sequence[int], *, most: int) -> tuple[int, ...]:
    """Places of at most ``most`` samples, in their order: half of them (rounded up) the largest, the others spread
    evenly over the rest, since each differs from its neighbours in an option.

    >>> chosen_samples([1, 9, 1, 8, 1, 1], most=4)
    (0, 1, 3, 5)
    """
    if len(sizes) <= most:
        return tuple(range(len(sizes)))
    largest = sorted(range(len(sizes)), key=lambda place: (-sizes[place], place))[: -(-most // 2)]
    rest = [place for place in range(len(sizes)) if place not in largest]
    count = most - len(largest)
    spread = [rest[round(step * (len(rest) - 1) / max(1, count - 1))] for step in range(count)]
    return tuple(sorted([*largest, *spread]))


def chosen_ops(
    known: Sequence[tuple[str, str]], *, only: Collection[str], filters: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Of ``(source, op)``, those that are named or that match one of the regular expressions; all where neither says.

    Raises:
        HashbenchError: a name is unknown, an expression is none, or nothing is left.
    """
    names = {name for _, name in known}
    unknown = sorted(set(only) - names)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(names), n=3)
        raise HashbenchError(
            f"there is no op called {unknown[0]!r}",
            consequence="nothing was run",
            tip=f"Did you mean {' or '.join(near)}?" if near else "Names are those of torch's op database.",
        )
    expressions = [_compiled(text) for text in filters]
    chosen = tuple(
        (source, name)
        for source, name in known
        if (not only and not expressions) or name in only or any(one.search(name) for one in expressions)
    )
    if not chosen:
        raise HashbenchError("no op matches", consequence="nothing was run", tip="Check --ops and -k.")
    return chosen


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise HashbenchError(
            f"{text!r} is no regular expression", consequence=f"{error}; nothing was run", tip="Mend it after -k."
        ) from error


def groups_of(ops: Sequence[tuple[str, str]], *, size: int) -> list[tuple[tuple[str, str], ...]]:
    """The ops in groups of about ``size``, dealt like cards: neighbours, which take equally long, are spread."""
    count = max(1, -(-len(ops) // size))
    return [tuple(ops[place::count]) for place in range(count)]
