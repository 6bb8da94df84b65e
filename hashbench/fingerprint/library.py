"""Which library computed a call: oneDNN and MKL say so themselves, in what they print when they are asked to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ATEN, UNKNOWN = "ATen native", "unknown"

_ONEDNN = re.compile(
    r"^onednn_verbose,(?:v\d+,)?primitive,exec,[^,]*,(?P<primitive>[^,]*),(?P<kernel>[^,]*),", re.MULTILINE
)
_MKL = re.compile(r"^MKL_VERBOSE (?P<kernel>[A-Za-z]\w*)\(", re.MULTILINE)
_PRINTED = re.compile(r"^(?:onednn_verbose,|MKL_VERBOSE ).*\n?", re.MULTILINE)

_MOVES = "reorder"
"""The primitive of oneDNN by which it only brings tensors into its own layout."""

_LONGEST = 120


class Listener:
    """Has calls run while the libraries print what they do. What they print goes to standard output, which is a file
    of its own meanwhile for the whole process; what others print there is passed on."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._flush = ctypes.CDLL(None).fflush
        self._verbose: Any = getattr(torch._C, "_verbose", None)

    def library_of(self, func: Any, device: torch.device, call: Callable[[], object]) -> str:
        """What computes ``call``, one call of the op ``func``: ``oneDNN brgconv:avx512_core``, ``MKL SGEMM``, several
        after one another; :data:`ATEN` where neither is called by an op of torch's own, the namespace of any other op,
        and :data:`UNKNOWN` where nobody can say."""
        namespace = func._schema.name.partition("::")[0]
        if namespace != "aten":
            call()
            return namespace if namespace not in ("prims", "quantized", "mkldnn") else UNKNOWN
        if device.type != "cpu" or self._verbose is None:
            call()
            return next((name for word, name in _NAMED.items() if word in func._schema.name), UNKNOWN)
        with self._listening() as heard:
            call()
        names = [f"oneDNN {match['kernel']}" for match in _ONEDNN.finditer(heard[0]) if match["primitive"] != _MOVES]
        names += [f"MKL {match['kernel']}" for match in _MKL.finditer(heard[0])]
        return ", ".join(sorted(set(names)))[:_LONGEST] or ATEN

    @contextlib.contextmanager
    def _listening(self) -> Iterator[list[str]]:
        heard = [""]
        self._flush(None)
        begin = self._file.seek(0, os.SEEK_END)
        standard = os.dup(1)
        os.dup2(self._file.fileno(), 1)
        try:
            self._verbose.mkldnn_set_verbose(1)
            self._verbose.mkl_set_verbose(1)
            try:
                yield heard
            finally:
                self._verbose.mkldnn_set_verbose(0)
                self._verbose.mkl_set_verbose(0)
                self._flush(None)
        finally:
            os.dup2(standard, 1)
            os.close(standard)
            self._file.seek(begin)
            heard[0] = self._file.read().decode(errors="replace")
            if others := _PRINTED.sub("", heard[0]):
                os.write(1, others.encode(errors="replace"))


def measure_clock() -> bool:
    """Have MKL measure the processor's clock; false where torch has no MKL that can be asked.

    MKL says the clock before the first call that it prints in a process, and takes up to a second for it: it counts
    until the seconds of the system's time change. Forks of this process know it already. No call is made by this, so no
    threads begin.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        measure = library.mkl_serv_get_clocks_frequency
    except (OSError, AttributeError):
        return False
    measure.restype = ctypes.c_double
    return float(measure()) > 0


_NAMED = {"cudnn": "cuDNN", "miopen": "MIOpen"}
"""On accelerators: ops that are called as the library that computes them."""


@contextlib.contextmanager
def listener() -> Iterator[Listener]:
    """A :class:`Listener` with a file for what it hears."""
    with tempfile.TemporaryFile() as file:
        yield Listener(file)
