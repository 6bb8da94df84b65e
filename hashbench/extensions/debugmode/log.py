"""Reader of the logs that ``torch.utils._debug_mode.DebugMode.save_logs`` writes (torch 2.14 and newer).

Such a log is one JSON document, version 1 of its format, with a call per op, Triton kernel, redistribution and
annotation. It is parsed here without torch, and nothing in it is unpickled or run. A document of another version, or
with a kind of call that version 1 lacks, is refused: what is not understood may differ.

Text that differs between equal runs is normalised: the numbers of tensors (``t$3``, with ``record_ids``) and addresses
(``0x7f…``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar

from hashbench.core.errors import HashbenchError
from hashbench.core.io import DEEPEST, parse_json

FORMAT, VERSION = "torch.utils._debug_mode.DebugMode.logs", 1

OP, REDISTRIBUTE, TRITON, PLACEMENT, ANNOTATION = "op", "redistribute", "triton_kernel", "output_placement", "annotate"
"""Kinds of call."""

_Value = TypeVar("_Value")

TENSOR = re.compile(r"\b(?:dt|ft|t): \w+\[[^\]]*\](?:\{[^}]*\})?(?:\| [^\s,']+)?")
"""A tensor as DebugMode shows it: ``t: f32[3, 4]``, ``dt: f32[8, 8]| S(0)``."""

Hashes = Mapping[str, str]
"""Hash by argument or output, as text: a float has a point, an exponent, ``nan`` or ``inf``; an integer has none."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One entry of a log.

    Attributes:
        kind: :data:`OP`, :data:`REDISTRIBUTE`, :data:`TRITON`, :data:`PLACEMENT` or :data:`ANNOTATION`.
        name: of the op, kernel or annotation, as in the log (``aten::addmm``).
        depth: levels of calls, modules and regions around it.
        arguments: arguments as text, tensors as ``t: f32[3, 4]``.
        output: outputs as text; empty if not recorded, or nothing was returned.
        inputs: hashes of the tensors it read, taken before the call; ``None`` if none were taken.
        outputs: hashes of what it returned or, of a kernel, of its arguments afterwards; ``None`` if none were taken.
        module: path of the innermost ``nn.Module`` (with ``record_nn_module``).
        source: ``file:line function`` of the caller (with ``record_stack_trace``).
    """

    kind: str
    name: str
    depth: int
    arguments: str = ""
    output: str = ""
    inputs: Hashes | None = None
    outputs: Hashes | None = None
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class DebugLog:
    """The calls of one run, in order.

    Attributes:
        calls: all entries of the log.
        hashed_inputs: the log was made with ``hash_inputs=True``.
    """

    calls: tuple[LoggedCall, ...]
    hashed_inputs: bool = False

    @property
    def hash_kinds(self) -> frozenset[str]:
        """The types of its output hashes: ``float`` (the norm), ``int`` (``hash_tensor``), ``other``."""
        hashes = (value for call in self.calls for value in (call.outputs or {}).values())
        return frozenset(map(kind_of_hash, hashes))


def is_debug_log(text: str) -> bool:
    """Return True if a text may be such a log: a JSON document, as no hashbench trace is."""
    return text.lstrip()[:1] in ("{", "[")


def loads(text: str, *, name: str = "log") -> DebugLog:
    """Parse the text of a log; ``name`` names it in errors.

    Raises:
        HashbenchError: it is truncated, damaged, or no log of version 1.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        reason = f"it is truncated or no JSON ({error})"
        raise _unreadable(name, reason) from error
    try:
        return _parse(document)
    except (ValueError, OverflowError) as error:
        raise _unreadable(name, str(error)) from error


def _unreadable(name: object, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the DebugMode log {name}",
        consequence=f"{reason}, so nothing was compared",
        tip="Make it again with `DebugMode.save_logs` of torch 2.14 or newer.",
    )


def _fail(reason: str) -> NoReturn:
    raise ValueError(reason)


# ------------------------------------------------------------------------------------------------------ parsing


def _parse(document: Any) -> DebugLog:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _fail("it is not a log of DebugMode.save_logs (another `format`)")
    if type(document.get("version")) is not int or document["version"] != VERSION:
        _fail(f"it has version {document.get('version')!r:.40}, this hashbench reads {VERSION}: another torch wrote it")
    entries = document.get("logs")
    if not isinstance(entries, list):
        _fail("it has no list of calls")
    calls = [_parse_call(entry, number) for number, entry in enumerate(entries)]
    hashed = any(call.inputs is not None for call in calls)
    calls = [replace(call, inputs={}) if _reads_no_tensor(call) else call for call in calls]
    return DebugLog(tuple(_with_modules(calls)), hashed)


def _reads_no_tensor(call: LoggedCall) -> bool:
    """Return True for a hashed op without tensors among its arguments, for which DebugMode stores no inputs."""
    hashed = call.kind == OP and call.inputs is None and call.outputs is not None
    return hashed and not TENSOR.search(call.arguments)


_FIELDS: Mapping[str, tuple[str, ...]] = {
    OP: ("op_name", "args_str", "kwargs_str"),
    REDISTRIBUTE: ("arg_str", "src_placement_str", "dst_placement_str"),
    TRITON: ("kernel_name", "kwargs_str"),
    PLACEMENT: ("placements_str",),
    ANNOTATION: ("tag", "header"),
}
"""Text that an entry of each kind must have."""


_DEEPEST_CALL = 10_000


def _parse_call(entry: Any, number: int) -> LoggedCall:
    if not isinstance(entry, dict):
        _fail(f"call {number} is no object")
    kind, depth = entry.get("type"), entry.get("call_depth")
    if not isinstance(kind, str) or kind not in _FIELDS:
        _fail(f"call {number} is of an unknown kind, {kind!r:.40}")
    if type(depth) is not int or not 0 <= depth < _DEEPEST_CALL:
        _fail(f"call {number} has no depth")
    fields = [_text(entry, name, number) for name in _FIELDS[kind]]
    log = _dictionary(entry.get("log"), number)
    call = LoggedCall(
        kind,
        *_named(kind, fields, entry, number),
        output=_normal(_optional(entry, "output_str", number).strip().removeprefix("->").strip()),
        source=_source(_optional(entry, "fwd_stack_trace", number) or _optional(entry, "stack_trace", number)),
    )
    if kind == TRITON:
        before, after = (entry.get(name) for name in ("pre_hashes", "post_hashes"))
        return replace(call, inputs=_hashes(before, number), outputs=_hashes(after, number))
    inputs, outputs = (_hashes(log.get(name), number) for name in ("input_hash", "hash"))
    return replace(call, inputs=_by_argument(inputs, number), outputs=outputs)


def _named(kind: str, fields: Sequence[str], entry: Mapping[str, Any], number: int) -> tuple[str, int, str]:
    """Return name, depth and arguments of an entry."""
    depth = int(entry["call_depth"])
    match kind:
        case "op":
            return _normal(fields[0]), depth, _normal("".join(fields[1:]))
        case "redistribute":
            traced = _optional(entry, "transform_info_str", number)
            flags = [word for word in ("is_explicit", "is_outer_call") if entry.get(word)]
            return "redistribute_input", depth, _normal(", ".join([*fields, traced, *flags]))
        case "triton_kernel":
            return fields[0], depth, _normal(fields[1])
        case "output_placement":
            return "output placement", depth, _normal(fields[0])
    return f"[{fields[1]}] {_normal(fields[0])}", depth, ""


def _text(entry: Mapping[str, Any], name: str, number: int) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        _fail(f"call {number} has no text {name!r}")
    return value


def _optional(entry: Mapping[str, Any], name: str, number: int) -> str:
    return "" if entry.get(name) is None else _text(entry, name, number)


_IDENTITY = re.compile(r"(?<=[a-z])\$\d+(?=: )")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def _normal(text: str) -> str:
    return _ADDRESS.sub("0x…", _IDENTITY.sub("", text))


_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<")
_BACKSLASH = "\\"


def _source(stack: str) -> str:
    """Return ``file:line function`` of the innermost frame outside installed packages."""
    frames = [frame for frame in _FRAME.finditer(stack) if not _INSTALLED.search(frame["file"])]
    if not frames:
        return ""
    last = frames[-1]
    return f"{PurePosixPath(last['file'].replace(_BACKSLASH, '/')).name}:{last['line']} {last['function']}"


# ------------------------------------------------------------------------------------------------------- hashes


def _dictionary(value: Any, number: int) -> dict[str, Any]:
    """Return the entries of a serialised dict by name; of ``None`` none."""
    if value is None:
        return {}
    if not isinstance(value, dict) or value.get("type") != "dict":
        _fail(f"call {number} has a log that is no dict")
    return _once_each(_items(value, number), number)


def _once_each(pairs: Iterable[tuple[str, _Value]], number: int) -> dict[str, _Value]:
    """Return pairs as a dict; of two with one name, one would be lost."""
    known: dict[str, _Value] = {}
    for name, value in pairs:
        if name in known:
            _fail(f"call {number} has {name!r:.40} twice")
        known[name] = value
    return known


def _items(value: Mapping[str, Any], number: int) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a serialised container by name or index."""
    items = value.get("items")
    if not isinstance(items, list):
        _fail(f"call {number} has a value without items")
    for index, item in enumerate(items):
        if value["type"] != "dict":
            yield str(index), item
        elif isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
            yield item[0], item[1]
        else:
            _fail(f"call {number} has a dict without pairs")


def _hashes(value: Any, number: int) -> Hashes | None:
    """Return the leaves of a serialised value by their path (``0.1``, ``out``); what is no tensor has none."""
    return None if value is None else _once_each(_leaves(value, "", number, 0), number)


def _leaves(value: Any, path: str, number: int, level: int) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict) or level > DEEPEST:
        _fail(f"call {number} has a value that no DebugMode writes")
    match value.get("type"):
        case "scalar":
            if (text := _hash_text(value.get("value"), number)) is not None:
                yield path, text
        case "nonfinite_float" if value.get("value") in ("nan", "inf", "-inf"):
            yield path, str(value["value"])
        case "tuple" | "list" | "dict":
            for name, item in _items(value, number):
                yield from _leaves(item, f"{path}.{name}" if path else name, number, level + 1)
        case kind:
            _fail(f"call {number} has a value of an unknown kind, {kind!r:.40}")


def _hash_text(value: Any, number: int) -> str | None:
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        _fail(f"call {number} has a number that no JSON has")
    if not isinstance(value, bool | int | float | str):
        _fail(f"call {number} has a hash that is no scalar")
    return json.dumps(value)


def _by_argument(hashes: Hashes | None, number: int) -> Hashes | None:
    """Drop the index that tells positional arguments (0) from keywords (1): ``1``, ``out``."""
    if hashes is None:
        return None
    return _once_each(((path.partition(".")[2] or path, value) for path, value in hashes.items()), number)


def kind_of_hash(text: str) -> str:
    """Return ``float``, ``int`` or ``other``."""
    if text in ("true", "false") or text.startswith('"'):
        return "other"
    return "int" if text.lstrip("-").isdigit() else "float"


def says_nothing(text: str) -> bool:
    """Return True for a hash that many tensors share: a norm that is NaN or infinite hides all other elements, and an
    xor of 0 is that of every tensor of an even number of equal elements."""
    return text in ("nan", "inf", "-inf", "0")


# ------------------------------------------------------------------------------------------------------ modules


def _with_modules(calls: Sequence[LoggedCall]) -> Iterator[LoggedCall]:
    """Add the innermost module to each call.

    DebugMode writes when a module or region begins and never when it ends: it has ended before the next entry on a
    lower level.
    """
    open_scopes: list[tuple[int, str]] = []
    for call in calls:
        level = _level(call)
        while open_scopes and open_scopes[-1][0] > level:
            open_scopes.pop()
        header, _, name = call.name.partition("] ")
        yield replace(call, module=next((module for _, module in reversed(open_scopes) if module), ""))
        if call.kind == ANNOTATION and header.startswith("[nn.Mod"):
            open_scopes.append((level + 1, name))
        elif (call.kind == ANNOTATION and header == "[record function") or _is_torch_function(call):
            open_scopes.append((level + 1, ""))


def _level(call: LoggedCall) -> int:
    """Return DebugMode's counter at an entry: most kinds are written one deeper, to stand below what made them."""
    if call.kind == ANNOTATION:
        return call.depth - 1 if call.name.startswith("[nn.Mod") else call.depth
    of_dtensor = call.kind == OP and re.search(r"\bdt: ", call.arguments) is not None
    return call.depth if of_dtensor or _is_torch_function(call) else call.depth - 1


def _is_torch_function(call: LoggedCall) -> bool:
    """Return True for ``torch.mm`` and the like (``record_torchfunction``): an op has a namespace."""
    return call.kind == OP and "::" not in call.name
