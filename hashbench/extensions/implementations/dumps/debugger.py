"""Dumps of transformers' ``model_addition_debugger_context``: a tree of calls in JSON, tensors in safetensors.

With ``use_repr=True`` (its default) it writes printed values alone, cut at 1,000 elements, with five digits. A file is
named after its module: of a module that was called twice it has the last call alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hashbench.core.errors import named_line
from hashbench.core.io import read_file
from hashbench.core.text import count, join_limited
from hashbench.extensions.implementations.checkpoint import open_checkpoint
from hashbench.extensions.implementations.dumps.dump import Dump, DumpedTensor, DumpReader, unreadable

FULL, SUMMARY = "_debug_tree_FULL_TENSORS.json", "_debug_tree_SUMMARY.json"
_AGAIN = "Run the debugger with use_repr=False, do_prune_layers=False."


def _applies(path: Path) -> bool:
    return (
        path.name.endswith((FULL, SUMMARY))
        if path.is_file()
        else any(any(path.glob(f"*{name}")) for name in (FULL, SUMMARY))
    )


def _read(path: Path) -> Dump:
    trees = [path] if path.is_file() else sorted(path.glob(f"*{FULL}"))
    if not trees or trees[0].name.endswith(SUMMARY):
        raise unreadable(path, f"it has summaries alone, no file *{FULL}", _AGAIN)
    if len(trees) > 1:
        raise unreadable(path, f"it holds {len(trees)} models", f"Name one: {trees[0]}.")
    try:
        tree = json.loads(read_file(trees[0]))
        values = [value for node in _calls(tree) for value in _values(node)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(trees[0], f"it is no tree of calls ({named_line(error, limit=80)})", _AGAIN) from error
    files = [value for value in values if isinstance(value, str)]
    if not files:
        why = "its tensors are printed, not saved" if values else "no call in it has a tensor"
        raise unreadable(trees[0], why, _AGAIN)
    folder, names = trees[0].parent, [Path(file).name.removesuffix(".safetensors") for file in files]
    times = Counter(names)
    ordered = [name for place, name in enumerate(names) if name not in names[place + 1 :]]
    model = trees[0].name.removesuffix(FULL)
    unnamed = {file.stem for file in folder.glob(f"{model}[._]*.safetensors")} - times.keys()
    tensors = []
    for name in _placed(ordered, sorted(unnamed)):
        if not (folder / f"{name}.safetensors").is_file():
            raise unreadable(trees[0], f"it names {name}.safetensors, which is not beside it", "Copy the whole folder.")
        source = open_checkpoint(folder / f"{name}.safetensors")
        tensors += [DumpedTensor(name.removeprefix(f"{model}."), source, key) for key in source.headers]
    again = [name.removeprefix(f"{model}.") for name in ordered if times[name] > 1]
    notes = []
    if again:
        notes.append(f"{join_limited(again, 2)}: written more than once, the last call alone is in the file.")
    if inside := [name for name in unnamed if not name.startswith(f"{model}_outputs")]:  # those are pruned always
        said = count(len(inside), "tensor")
        notes.append(f"{said} beside the tree of {path}, not in it, as do_prune_layers has it: placed by their names.")
    return Dump("transformers' model debugger", "of calls", True, tuple(tensors), tuple(notes))


def _calls(node: Any) -> Iterator[Any]:
    """Yield what each call read, what its children did, what it returned."""
    yield node.get("inputs")
    for child in node.get("children") or ():
        yield from _calls(child)
    yield node.get("outputs")


def _values(node: Any) -> Iterator[Any]:
    """Yield the value of each tensor: a path, or lines that were printed."""
    if isinstance(node, dict) and {"shape", "dtype", "value"} <= node.keys():
        yield node["value"]
    elif isinstance(node, (dict, list)):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _values(part)


def _placed(ordered: list[str], unnamed: list[str]) -> list[str]:
    """Return names in the order of calls; those of a layer that is in no call stand behind the layer before it."""
    placed, layers = list(ordered), defaultdict[tuple[str, int], list[str]](list)
    for name in unnamed:
        layers[_layer(name)[:2]].append(name)
    for (above, number), names in sorted(layers.items(), key=lambda each: (each[0][1] < 0, each[0])):
        found = {place: _layer(name) for place, name in enumerate(placed)}
        before = [place for place, layer in found.items() if layer[0] == above and layer[1] < number]
        last = max(before, default=len(placed) - 1)
        rank = {found[place][2]: place for place in before if found[place][:2] == found[last][:2]}
        placed[last + 1 : last + 1] = sorted(names, key=lambda name: (rank.get(_layer(name)[2], len(placed)), name))
    return placed


def _layer(name: str) -> tuple[str, int, str]:
    """Return what is above the first number in a name, the number (-1: none), and what is below."""
    found = re.match(r"(.*?)\.(\d+)(?=[._])(.*)", name)
    return (found[1], int(found[2]), found[3]) if found else ("", -1, name)


READER = DumpReader(_applies, _read)
