"""The error that a user sees, exceptions in one line, and whether one says that memory ran out. Pure.

Torch has a class for what its own allocators refuse; libraries below it and drivers say it in words only.
"""

from __future__ import annotations

import errno
import re


class HashbenchError(Exception):
    """A mistake of the caller's: what, its consequence, and what to do. The command line prints it on one line."""

    def __init__(self, what: str, *, consequence: str = "", tip: str = "") -> None:
        self.what, self.consequence, self.tip = what, consequence, tip
        text = what if not consequence else f"{what}: {consequence}"
        super().__init__(f"{text.rstrip('.')}.{' ' + tip if tip else ''}")


LONGEST_TEXT = 10_000
"""Characters that are kept of the text of an error: a model's may hold all of a tensor."""


def bounded(text: str) -> str:
    """Return a text as it is, or its beginning and end where it has more than :data:`LONGEST_TEXT` characters."""
    left_out = len(text) - LONGEST_TEXT
    half = LONGEST_TEXT // 2
    return text if left_out <= 0 else f"{text[:half]} … ({left_out} characters left out) … {text[-half:]}"


def first_line(error: BaseException | str) -> str:
    """The first line of an exception's message, or of a text, that is not blank; empty where there is none."""
    return next((line.strip() for line in bounded(str(error)).splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """The last line of a text that is not blank; empty where there is none."""
    return next((line.strip() for line in reversed(bounded(text).splitlines()) if line.strip()), "")


def named_line(error: BaseException, *, limit: int = 0) -> str:
    """``ValueError: the first line of its message``, cut off after ``limit`` characters (0: nowhere)."""
    text = f"{type(error).__name__}: {first_line(error) or 'no message'}"
    return text[:limit] if limit else text


_CLASSES = frozenset({"MemoryError", "OutOfMemoryError"})
"""Python's, and torch's for its allocators on CUDA, ROCm, XPU, MPS and private backends (``torch.OutOfMemoryError``,
which is also ``torch.cuda.OutOfMemoryError``)."""

_TEXT = re.compile(
    r"""
    \bout\s+of\s+(host\s+|device\s+|gpu\s+)?memory\b(?![ ]format)  # CUDA error: …, HIP error: …, Triton Error [CUDA]: …
    | can't[ ]allocate[ ]memory | cannot[ ]allocate[ ]memory | not[ ]enough[ ]memory  # of the host, also on Windows
    | std::bad_alloc
    | \b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED\b
    | \bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b  # cuDNN 9
    | \b(CUFFT|HIPFFT)_ALLOC_FAILED\b
    | \bmiopenStatusAllocFailed\b | \brocblas_status_memory_error\b
    | \b(hip|cuda)ErrorOutOfMemory\b | \b(cuda|hip)ErrorMemoryAllocation\b | \bCUDA_ERROR_OUT_OF_MEMORY\b
    | \b(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b | \bZE_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b  # SYCL
    """,
    re.IGNORECASE | re.VERBOSE,
)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, says that memory of the host or of a device ran out."""
    while error is not None:
        if _says_so(error):
            return True
        error = error.__cause__
    return False


def _says_so(error: BaseException) -> bool:
    if any(kind.__name__ in _CLASSES for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_TEXT.search(bounded(str(error))))
