"""The bits of elements: their dtypes, and rounding from a wider to a narrower one as torch does it. No torch.

Elements travel as unsigned integers of their size: NumPy has no bfloat16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger]

SIZES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1},
}
"""Name of a dtype, as torch has it -> bytes of an element."""

NARROWER = {
    "float64": ("float32", "float16", "bfloat16"),
    "float32": ("float16", "bfloat16"),
    "float16": ("bfloat16",),  # neither holds all values of the other
    "bfloat16": ("float16",),
}
"""Dtype -> those that its elements can be rounded to."""

_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}


def unsigned(dtype: str) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned integers that hold elements of a dtype, little-endian."""
    return np.dtype(f"<u{SIZES[dtype]}")


def common_dtypes(one: str, other: str) -> tuple[str, ...]:
    """Return the dtypes in which elements of both can be compared: the narrower one, both of float16 and bfloat16; none
    where neither can be rounded to the other."""
    if one == other:
        return (one,)
    if {one, other} == {"float16", "bfloat16"}:
        return ("float16", "bfloat16")
    return tuple(narrow for wide, narrow in ((one, other), (other, one)) if narrow in NARROWER.get(wide, ()))


def rounded(bits: Bits, dtype: str, to: str) -> Bits:
    """Return elements of ``dtype`` rounded to ``to``, to nearest, ties to even; every NaN becomes the usual one."""
    if dtype == to:
        return bits
    values = as_float(bits, dtype)
    with np.errstate(all="ignore"):
        if to == "float32":
            return values.astype("<f4").view("<u4")
        if to == "float16":
            made: Bits = values.astype("<f4").astype("<f2").view("<u2")  # torch converts a float64 twice
        else:
            whole = values.astype("<f4").view("<u4")
            made = ((whole + np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
                "<u2"
            )
    return np.where(np.isnan(values), np.uint16(_NAN[to]), made).astype("<u2")


def is_representable(bits: Bits, dtype: str, to: str) -> bool:
    """Return whether rounding these elements to ``to`` loses nothing."""
    values, back = as_float(bits, dtype), as_float(rounded(bits, dtype, to), to)
    return bool(np.all((values == back) | (np.isnan(values) & np.isnan(back))))


def as_float(bits: Bits, dtype: str) -> npt.NDArray[np.floating]:
    """Return the values of elements of a floating dtype that NumPy can represent."""
    if dtype == "bfloat16":
        return (bits.astype("<u4") << np.uint32(16)).view("<f4")
    kinds = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
    return np.ascontiguousarray(bits).view(kinds[dtype])


def value_text(bits: int, dtype: str) -> str:
    """Return one element as text; of a dtype without values here its bits."""
    element = np.array([bits], dtype=unsigned(dtype))
    if dtype in NARROWER:
        return f"{float(as_float(element, dtype)[0]):.9g}"
    if dtype.startswith("int"):
        return str(int(element.view(f"<i{SIZES[dtype]}")[0]))
    return str(bits) if dtype.startswith("uint") or dtype == "bool" else f"0x{bits:0{2 * SIZES[dtype]}x}"
