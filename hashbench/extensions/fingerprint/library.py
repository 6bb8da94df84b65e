"""Find out which library computed a call, from the verbose output of oneDNN and MKL."""

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
"""The oneDNN primitive that only converts tensors to its own layout."""

_LONGEST = 120


class Listener:
    """Runs calls while the libraries are verbose.

    Meanwhile standard output of the whole process is redirected to a file; other output is passed on.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._flush = ctypes.CDLL(None).fflush
        self._verbose: Any = getattr(torch._C, "_verbose", None)

    def library_of(self, func: Any, device: torch.device, call: Callable[[], object]) -> str:
        """Run ``call``, one call of the op ``func``, and return the library that computed it.

        ``oneDNN brgconv:avx512_core``, ``MKL SGEMM``, or several, comma-separated; :data:`ATEN` if one of torch's own
        ops used neither, the namespace of any other op, and :data:`UNKNOWN` if it cannot be determined.
        """
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
    """Make MKL measure the processor's clock; return false if torch has no such MKL.

    MKL prints the clock before its first verbose call in a process, and takes up to a second for it: it counts until
    the second of the system time changes. Forks of this process inherit the result. No kernel is called, so no threads
    start.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        measure = library.mkl_serv_get_clocks_frequency
    except (OSError, AttributeError):
        return False
    measure.restype = ctypes.c_double
    return float(measure()) > 0


_NAMED = {"cudnn": "cuDNN", "miopen": "MIOpen"}
"""Accelerator ops named after the library that computes them."""


@contextlib.contextmanager
def listener() -> Iterator[Listener]:
    """Open a :class:`Listener` with a temporary file."""
    with tempfile.TemporaryFile() as file:
        yield Listener(file)
