"""Stand-in for a compiled Triton kernel: its calls run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hashbench.core.errors import named_line, ran_out_of_memory
from hashbench.extensions.compiled.as_device.devices import NamedDevice
from hashbench.extensions.compiled.as_device.interpreter import InterpretedTriton, NotInterpretedError, interpreted


class InterpretedKernel:
    """A kernel of a generated module, under its name there, where a ``CachingAutotuner`` stands else.

    Its configuration is the first one of Inductor's heuristics: nothing is measured.

    Args:
        fn: Triton's function, to be interpreted.
        configs: of the heuristics, ``triton.Config``.
        triton_meta: as Inductor wrote it: ``signature``, ``constants``.
        inductor_meta: likewise: ``kernel_name``, ``grid_type``, ``mutated_arg_names``.
        triton: the private copy.
        source: of its module.

    Attributes:
        configs: the first one is that of every call.
        triton_interpret: as a ``CachingAutotuner`` has it, whose kernel is interpreted.
        refused: why the interpreter did not run the last call; empty if it did.
        substitute: makes a call that the interpreter refuses, from the kernel's arguments; ``None``: nothing does.
    """

    triton_interpret = True

    def __init__(
        self,
        fn: Any,
        *,
        configs: Sequence[Any],
        triton_meta: Mapping[str, Any],
        inductor_meta: Mapping[str, Any],
        triton: InterpretedTriton,
        source: str = "",
        filename: str = "",
    ) -> None:
        self.fn, self.configs = fn, tuple(configs)
        self.triton_meta, self.inductor_meta = triton_meta, inductor_meta
        self.mutated_arg_names: tuple[str, ...] = tuple(inductor_meta.get("mutated_arg_names", ()))
        self.source, self.filename = source, filename
        self.refused = ""
        self.substitute: Callable[[Sequence[Any]], None] | None = None
        self._triton = triton

    @property
    def __name__(self) -> str:
        return str(self.fn.__name__)

    def run(self, *args: Any, stream: Any = None, benchmark_run: bool = False, **options: Any) -> None:  # noqa: ARG002
        """Make a call: as ``CachingAutotuner.run``, with CPU tensors.

        Args:
            args: of the kernel without its constants, in the order of its signature, and of its grid if that is given.
            stream: unused.
            benchmark_run: unused.
            options: configuration of this call, by name (``XBLOCK``); others as in the first of ``configs``.

        Raises:
            NotInterpretedError: the interpreter refuses it, and nothing stands in. Its results may be written in part.
        """
        self.refused, updated = "", self._updated(args)
        try:
            self._run(args, options)
        except NotInterpretedError as refusal:
            for tensor, before in updated:
                tensor.copy_(before)
            if self.substitute is None:
                raise
            self.substitute(args)
            self.refused = str(refusal)

    def _updated(self, args: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the arguments that a call reads and writes, each with a copy."""
        if self.substitute is None:
            return []
        tensors = [
            value for name, value in zip(self.fn.arg_names, args, strict=False) if name in self.mutated_arg_names
        ]
        return [(tensor, tensor.clone()) for tensor in tensors if isinstance(tensor, torch.Tensor)]

    def _run(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        chosen = {**self.configs[0].kwargs, **options}
        given = self._named(args, chosen)
        numbers = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        grid = self._grid({**numbers, **chosen})
        inside = {name: value for name, value in given.items() if name not in self._launcher_args}
        try:
            with np.errstate(all="ignore"), torch.no_grad(), self._triton.running(inside.values()):
                self.fn[grid](**inside, **chosen)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            raise NotInterpretedError(f"{self.__name__}: {named_line(error, limit=200)}") from error

    @property
    def _launcher_args(self) -> Sequence[str]:
        """Names of arguments that a call has beside the kernel's: those of its grid."""
        return tuple(self.inductor_meta.get("extra_launcher_args", ()))

    def _named(self, args: Sequence[Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; those that are none of a call's have the value that Inductor gave them."""
        constants = {
            name: value for name, value in self.triton_meta.get("constants", {}).items() if isinstance(name, str)
        }
        names = [name for name in inspect.signature(self.fn.fn).parameters if name not in chosen]
        names += self._launcher_args
        passed = names if len(args) == len(names) else [name for name in names if name not in constants]
        fixed = {name: constants[name] for name in names if name not in passed}
        return {**fixed, **dict(zip(passed, args, strict=True))}

    def _grid(self, numbers: Mapping[str, Any]) -> tuple[int, ...]:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        meta: Any = self.inductor_meta
        return tuple(int(each) for each in GridExpr.from_meta(meta, {**numbers}).eval_slow({**numbers}))


_LARGEST, _MOST = 4096, 1 << 15
"""Elements of a block along x, which Inductor's masks allow (``TRITON_MAX_BLOCK``), and of a whole block."""


def enlarged(config: Any, size_hints: Mapping[str, int]) -> Any:
    """Return a configuration of Inductor's heuristics with the largest block along x: the interpreter takes as long for
    a small block as for a large one, and as many blocks as there are.

    Args:
        config: ``triton.Config``.
        size_hints: the numbers of elements, powers of two, by dimension: ``x``, ``y``, ``r0_``.
    """
    block = config.kwargs.get("XBLOCK")
    if not block or "x" not in size_hints:
        return config
    others = [config.kwargs.get(f"{name.upper()}BLOCK") or size for name, size in size_hints.items() if name != "x"]
    room = max(block, min(_LARGEST, size_hints["x"], _MOST // max(1, math.prod(others))))
    config.kwargs["XBLOCK"] = 1 << (room.bit_length() - 1)
    return config


def kernel_of(source: str, path: str, name: str, device: NamedDevice) -> InterpretedKernel:
    """Return the kernel of a module's text, as Inductor hands it to ``async_compile.triton``.

    Args:
        source: the text.
        path: of a file that holds it.
        name: of the kernel.
        device: that it was made for.

    Raises:
        ImportError: Triton is not installed.
    """
    triton = interpreted(device)
    decorated: Callable[..., Any] = functools.partial(_autotuned, triton, source)
    kernel = triton.load(source, path, name, decorated)
    if not isinstance(kernel, InterpretedKernel):
        raise NotInterpretedError(f"{name} has no configuration of Inductor's")
    return kernel


_WITH_BLOCKS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
"""Kinds of kernels (``HeuristicType``) whose blocks may have any size."""


def _autotuned(
    triton: InterpretedTriton,
    source: str,
    size_hints: Any,
    configs: Sequence[Any],
    triton_meta: Mapping[str, Any],
    heuristic_type: Any = None,
    filename: str = "",
    inductor_meta: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[[Any], InterpretedKernel]:
    """Stand for ``cached_autotune``: the first configuration, nothing measured."""
    meta = inductor_meta or {}
    first, *others = configs
    plain = getattr(heuristic_type, "name", "") in _WITH_BLOCKS and "RSPLIT_SIZE" not in first.kwargs
    if plain and isinstance(size_hints, Mapping) and meta.get("grid_type") in ("Grid1D", "Grid2D", "Grid3D"):
        first = enlarged(first, size_hints)

    def decorator(fn: Any) -> InterpretedKernel:
        parameters = inspect.signature(fn.fn).parameters
        for config in (first, *others):
            for name in [name for name in config.kwargs if name not in parameters and name.endswith("BLOCK")]:
                config.kwargs.pop(name)  # XBLOCK, where the code has 1
        return InterpretedKernel(
            fn,
            configs=(first, *others),
            triton_meta=triton_meta,
            inductor_meta=meta,
            triton=triton,
            source=source,
            filename=filename or "",
        )

    return decorator
