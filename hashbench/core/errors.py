"""The user-facing error, exceptions as one line or in the log, and detection of out-of-memory errors. No torch.

torch has a class for what its own allocators refuse; lower libraries and drivers only say it in the message.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback

log = logging.getLogger(__name__)


class HashbenchError(Exception):
    """A user error: what, its consequence, and what to do. The command line prints it on one line."""

    def __init__(self, what: str, *, consequence: str = "", tip: str = "") -> None:
        self.what, self.consequence, self.tip = what, consequence, tip
        text = what if not consequence else f"{what}: {consequence}"
        super().__init__(f"{text.rstrip('.')}.{' ' + tip if tip else ''}")


LONGEST_TEXT = 10_000
"""Maximum characters kept of an error message: a model's may hold a whole tensor."""


def bounded(text: str) -> str:
    """Return a text, or its beginning and end if it exceeds :data:`LONGEST_TEXT` characters."""
    left_out = len(text) - LONGEST_TEXT
    half = LONGEST_TEXT // 2
    return text if left_out <= 0 else f"{text[:half]} … ({left_out} characters left out) … {text[-half:]}"


def log_error(what: str) -> None:
    """Log the exception being handled, as text: a stored traceback would keep every tensor of the failed run alive."""
    log.error("%s\n%s", what, bounded(traceback.format_exc().rstrip()))


def first_line(error: BaseException | str) -> str:
    """Return the first non-blank line of an exception's message or of a text; empty if there is none."""
    return next((line.strip() for line in bounded(str(error)).splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """Return the last non-blank line of a text; empty if there is none."""
    return next((line.strip() for line in reversed(bounded(text).splitlines()) if line.strip()), "")


def named_line(error: BaseException, *, limit: int = 0) -> str:
    """Format as ``ValueError: the first line of its message``, cut after ``limit`` characters (0: no limit)."""
    text = f"{type(error).__name__}: {first_line(error) or 'no message'}"
    return text[:limit] if limit else text


_CLASSES = frozenset({"MemoryError", "OutOfMemoryError"})
"""Python's, and torch's for its allocators on CUDA, ROCm, XPU, MPS and private backends (``torch.OutOfMemoryError``,
also ``torch.cuda.OutOfMemoryError``)."""

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
    """Return whether ``error``, or its ``__cause__``, says that memory of the host or a device ran out."""
    while error is not None:
        if _is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    if any(kind.__name__ in _CLASSES for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_TEXT.search(bounded(str(error))))
