"""Which errors say that memory ran out: as torch, drivers and libraries word them, and some that only sound like it."""

from __future__ import annotations

import errno

import pytest
import torch

from hashbench.core.errors import ran_out_of_memory
from hashbench.core.run.outcome import failed_status, failure_of


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CPU = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which …"

YES = {
    "torch's class": torch.OutOfMemoryError(CUDA),
    "its older name": torch.cuda.OutOfMemoryError(CUDA),
    "its class for XPU": torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB."),
    "the driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "the driver, by torch's class for devices": torch.AcceleratorError("CUDA error: out of memory"),
    "ROCm's driver": RuntimeError("HIP error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cuSOLVER": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "hipBLAS": RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "MIOpen": RuntimeError("miopenStatusAllocFailed"),
    "SYCL": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB)"),
    "the host": RuntimeError(CPU),
    "the host on Windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    "C++": RuntimeError("std::bad_alloc"),
    "Python": MemoryError(),
    "NumPy": type("_ArrayMemoryError", (MemoryError,), {})("Unable to allocate 8.0 TiB for an array"),
    "the operating system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "a replica": RuntimeError(f"Caught OutOfMemoryError in replica 0 on device 0.\n{CUDA}"),
    "raised from one": caused(RuntimeError("the model could not be built"), MemoryError()),
}

NO = {
    "shared memory of a kernel": RuntimeError("out of resource: shared memory, Required: 262144, limit: 232448"),
    "a memory format": RuntimeError("the result would be out of memory format channels_last"),
    "an illegal access": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "a launch": RuntimeError("CUDA error: too many resources requested for launch"),
    "cuBLAS otherwise": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "a value that quotes the words": ValueError("the words 'out of memory' are not in the vocabulary"),
}


@pytest.mark.parametrize("name", YES)
def test_it_says_that_memory_ran_out(name: str) -> None:
    assert ran_out_of_memory(YES[name])
    assert failed_status(failure_of(YES[name]), number=1) == "eager_1st_run_OOM"
    assert failed_status(failure_of(YES[name]), number=2) == "eager_2nd_run_OOM"


@pytest.mark.parametrize("name", NO)
def test_it_only_sounds_like_it(name: str) -> None:
    assert not ran_out_of_memory(NO[name])
    assert failed_status(failure_of(NO[name]), number=1) == "eager_1st_run_fail"


def test_allocator_error_of_this_machine_is_oom() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    assert ran_out_of_memory(raised.value)
