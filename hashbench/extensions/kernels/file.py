"""The kernel, the reference and the inputs that a user's Python files define. Loading this imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hashbench.core.errors import HashbenchError
from hashbench.core.text import join_limited

if TYPE_CHECKING:
    import torch

    from hashbench.core.suites.user_file import UserFile

EXAMPLE = "the function that is named behind the colon"
INPUTS = "inputs"


class NamedFunction(NamedTuple):
    """A function of a file, written ``FILE.py:NAME``; ``NAME`` may have dots, as ``Norm.apply``."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def refuse_missing(self) -> None:
        """Raise :class:`HashbenchError` if there is no such file; nothing is imported."""
        if not self.path.is_file():
            raise HashbenchError(f"cannot check {self.path}", consequence="it does not exist", tip="Check the path.")


@dataclass(frozen=True, slots=True)
class FileKernel:
    """What is compared.

    Attributes:
        kernel, reference: both take the same arguments.
        inputs: arguments in order, of any kind, tensors among them.
        named: arguments by name.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def cast(self, dtype: str) -> FileKernel:
        """Return the same with the floating-point tensors among the inputs in another dtype, as ``bfloat16``."""
        import torch

        wanted = getattr(torch, dtype)
        return replace(self, inputs=_cast(self.inputs, wanted), named=_cast(dict(self.named), wanted))


def load_kernel(
    kernel: NamedFunction, reference: NamedFunction, inputs: NamedFunction | None, *, seed: int
) -> FileKernel:
    """Read a kernel, its reference and their inputs. The files are the user's own code, and are run.

    Args:
        kernel, reference: where they are.
        inputs: where the function is that makes the inputs: a tuple (positional arguments), a dict (keyword arguments)
            or one tensor. ``None``: ``NAME_inputs`` or ``inputs`` beside the kernel, or beside the reference.
        seed: of the generators before the inputs are made.

    Raises:
        HashbenchError: a file cannot be run, a function is not in it, or it makes no inputs.
    """
    from hashbench.core.run.rng import preserved_rng, reset_rng_state

    asked = (kernel, reference, *([inputs] if inputs is not None else []))
    from hashbench.core.suites.user_file import UserFile

    files = {path: UserFile.read(path, example=EXAMPLE) for path in dict.fromkeys(each.path for each in asked)}
    functions = FileKernel(_function(files[kernel.path], kernel.name), _function(files[reference.path], reference.name))
    source = inputs or _inputs_of(kernel, reference, files)
    file = files[source.path]
    make = _function(file, source.name)
    with preserved_rng():
        reset_rng_state(seed)
        made = file.inputs(source.name, make)
    if isinstance(made, dict):
        return replace(functions, named=made)
    return replace(functions, inputs=tuple(made) if isinstance(made, (tuple, list)) else (made,))


def _inputs_of(kernel: NamedFunction, reference: NamedFunction, files: Mapping[Path, UserFile]) -> NamedFunction:
    """Return the first function that may make the inputs."""
    for each in (kernel, reference):
        for name in (f"{each.name.partition('.')[0]}_{INPUTS}", INPUTS):
            if files[each.path].names.get(name) is not None:
                return NamedFunction(each.path, name)
    what = f"it has no function {kernel.name.partition('.')[0]}_{INPUTS}, and none {INPUTS}"
    raise files[kernel.path].unusable(what, "Write one that returns a tuple, or name it: --inputs FILE.py:NAME.")


def _function(file: UserFile, name: str) -> Callable[..., Any]:
    """Return the function of a name, which may have dots."""
    first, *rest = name.split(".")
    owner = file.names.get(first)
    for part in rest:
        owner = getattr(owner, part, None)
    if owner is not None:
        return replace(file, names={name: owner}).function(name)
    known = [each for each, value in file.names.items() if callable(value) and not each.startswith("_")]
    tip = f"It has {join_limited(known)}." if known else "It has no function at all."
    raise file.unusable(f"it has no function {name}", tip)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors in ``dtype``; lists, tuples and dicts keep their kind."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(each, dtype) for each in value)
    return value
