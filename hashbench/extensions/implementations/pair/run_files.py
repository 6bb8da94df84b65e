"""A recorded run as files: its trace as text, nodes as JSON, and arrays as ``.npz``. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hashbench.core.divergence.content import ContentGraph, ContentNode, Kind, Moments
from hashbench.core.trace import file
from hashbench.extensions.implementations.pair.record import NodeOrigin, RecordedRun

_TRACE, _RUN, _ARRAYS = "trace.log.gz", "run.json", "arrays.npz"


def write_run(run: RecordedRun, folder: Path) -> None:
    """Write a run into a new folder."""
    folder.mkdir()
    file.write(run.trace, folder / _TRACE)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        f"rows {name}": node.rows for name, node in run.graph.nodes.items() if node.rows is not None
    }
    tensors = {"result": _written(run.results, "result", arrays), "value": _written(run.values, "value", arrays)}
    np.savez(folder / _ARRAYS, **arrays)  # type: ignore[arg-type]
    document = {
        "nodes": [_node_text(node) for node in run.graph],
        "results": dict(run.graph.results),
        "outputs": {name: [each.record, each.index, each.text] for name, each in run.outputs.items()},
        "digests": dict(run.digests),
        "fallbacks": dict(run.fallbacks),
        "tensors": tensors,
    }
    (folder / _RUN).write_text(json.dumps(document), encoding="utf-8")


def read_run(folder: Path) -> RecordedRun:
    """Read what :func:`write_run` has written."""
    document = json.loads((folder / _RUN).read_text(encoding="utf-8"))
    with np.load(folder / _ARRAYS, allow_pickle=False) as arrays:
        nodes = [_node(each, arrays) for each in document["nodes"]]
        results, values = (_read(document["tensors"][what], what, arrays) for what in ("result", "value"))
    return RecordedRun(
        ContentGraph({node.id: node for node in nodes}, document["results"]),
        {name: NodeOrigin(*each) for name, each in document["outputs"].items()},
        file.read(folder / _TRACE),
        results,
        digests=document["digests"],
        values=values,
        fallbacks=document["fallbacks"],
    )


def _node_text(node: ContentNode) -> list[Any]:
    moments = node.moments and [node.moments.sums, node.moments.sizes, node.moments.special]
    last = node.tolerance, node.numel, node.scalars, node.shape, node.ordered
    return [node.id, node.op, node.kind.value, moments, node.reads, node.copies, *last]


def _node(text: list[Any], arrays: Mapping[str, Any]) -> ContentNode:
    name, op, kind, moments, reads, copies, tolerance, numel, scalars, shape, ordered = text
    found = moments and Moments(tuple(moments[0]), tuple(moments[1]), moments[2])
    last = numel, arrays.get(f"rows {name}"), scalars, tuple(shape), tuple(ordered)
    return ContentNode(name, op, Kind(kind), found, tuple(reads), copies, tolerance, *last)


def _written(
    tensors: Mapping[str, torch.Tensor], what: str, arrays: dict[str, np.ndarray[Any, Any]]
) -> dict[str, list[Any]]:
    """Add the bytes of tensors to the arrays, and return their dtypes and shapes."""
    for name, tensor in tensors.items():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        arrays[f"{what} {name}"] = flat.view(torch.uint8).numpy()
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}


def _read(forms: Mapping[str, Any], what: str, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(arrays[f"{what} {name}"]).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape) in forms.items()
    }
