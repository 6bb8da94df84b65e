"""Facts about the ops that a log of DebugMode names, from torch's own schemas."""

from __future__ import annotations

import functools

import torch


@functools.cache
def is_random(name: str) -> bool:
    """Return True if the op of this name (``aten::rand``, ``aten::normal.float_Tensor``) draws random numbers.

    False for a name that the installed torch does not have.
    """
    qualified, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(qualified, overload)
        _, _, tags = torch._C._get_operation_overload(qualified, overload)
    except (RuntimeError, TypeError):  # no such op, or no such overload
        return False
    return torch.Tag.nondeterministic_seeded in tags or any(
        "Generator" in str(argument.type) for argument in schema.arguments
    )
