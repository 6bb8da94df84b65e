"""Fingerprints written by hand, for the tests of remarks and of sweeps."""

from __future__ import annotations

from dataclasses import replace

from hashbench.extensions.fingerprint.document import Kernel, ModelFingerprint

MM = Kernel(
    op="aten.mm.default",
    args=({"tensor": 0}, {"tensor": 1}),
    kwargs={},
    tensors=("float32[2,3]", "float32[3,4] >=0"),
    place="forward layer",
    calls=1,
    library="MKL SGEMM",
    outputs=("float32[2,4]:aa",),
    samples=("",),
)


PICK = replace(MM, op="aten.index.Tensor", tensors=("float32[9]", "int64[2] #0"), outputs=("float32[2]:bb",))


NET = ModelFingerprint(
    suite="zoo",
    name="net",
    mode="inference",
    device="cpu",
    dtype="float32",
    deterministic="on",
    threads=2,
    kernels=(MM, PICK),
    contents=("1:eNpjZAIAAAYAAw==",),
    left_out={},
)


OLD, NEW = ({"packages": {"torch": version}} for version in ("2.15.0", "2.15.1"))


OTHER_MM = replace(MM, outputs=("float32[2,4]:cc",))
