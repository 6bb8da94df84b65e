"""Evaluate a reference in its own dtype, in float64, and in float64 with random rounding after each op.

What rounding explains is sampled, so that errors which ops share (the sum of a row of softmax) are in the samples.
There are three models of it, from narrow to wide: :class:`Rounding`.

* A value is moved up or down by half a unit roundoff and rounded to the nearest number of its dtype: what the dtype
  holds exactly stays. Sums of small integers are therefore not rounded at all.
* A sum of n products rounds by ``u (S + sqrt(n/3) |s|)``, where s is the sum, S the sum of magnitudes: any order of
  the terms. Where all terms are multiples of what the last place of S counts, it is exact.
* The argument of an exponential function is rounded in float32: kernels scale it.
* Ops of several steps, as softmax and layer norm, are decomposed, as torch does; steps inside accumulate in float32.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.errors import named_line
from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rng import preserved_rng, random_states, states_differ
from hashbench.core.run.rounding_noise import RandomRounding, folded_terms
from hashbench.core.run.wide import WIDER, WideMode, default_dtype
from hashbench.core.run.workload import cloned
from hashbench.core.trace.arguments import generator_digest, mapped, tensors_in
from hashbench.core.trace.digest import unobserved, untraced
from hashbench.core.trace.op_schema import Pattern, plan_of


class NotJudgedError(Exception):
    """A reference cannot tell what is right: it draws random numbers, or has no value in float64."""


class Rounding(enum.Enum):
    """What is rounded, from narrow to wide."""

    ACCUMULATION = "accumulation"
    """Everything in float32 (float64 of a result in float64)."""
    EACH_OP = "rounding after each op"
    """Each op of the reference rounds to its own dtype; sums inside accumulate in float32."""
    LOW_ACCUMULATION = "low accumulation"
    """Sums accumulate in the dtype of their op as well."""


_SUMS = frozenset(
    """
    sum mean mm bmm addmm baddbmm addbmm mv addmv dot vdot addr cumsum convolution _convolution
    convolution_backward index_add index_add_ scatter_add scatter_add_ index_put_ index_put _index_put_impl_
    embedding_dense_backward avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d trace
    nansum col2im avg_pool2d_backward
    """.split()  # noqa: SIM905 - one name a line takes a page
)
"""Ops that sum products of their operands: on magnitudes they give the sum of magnitudes, on ones the terms."""

_SENSITIVE = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "sin", "cos", "tan"})
"""Ops whose argument is rounded before: kernels scale it by a constant, for exp2 and to reduce its range."""

_PART = 0.25
"""Part of the rounding of a sum that counts in a low dtype: kernels add up blocks there, not single terms."""

_MEANS = frozenset({"mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"})
"""Of them, those that divide by the number of terms."""

_COMPOSED = frozenset(
    """
    _softmax _log_softmax native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _batch_norm_with_update gelu silu mish softplus log_sigmoid_forward logsumexp logaddexp linalg_vector_norm
    _fused_rms_norm _scaled_dot_product_flash_attention_for_cpu _softmax_backward_data
    _log_softmax_backward_data native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
    gelu_backward silu_backward mish_backward softplus_backward log_sigmoid_backward sigmoid_backward
    tanh_backward _fused_rms_norm_backward nll_loss_forward binary_cross_entropy mse_loss smooth_l1_loss
    huber_loss addcmul addcdiv lerp glu elu celu selu hardswish hardsigmoid dist
    """.split()  # noqa: SIM905 - one name a line takes a page
)
"""Ops that compute in several steps, as kernels do."""

_COUNTED = frozenset({*WIDER, *WIDER.values()})


@dataclass(frozen=True, slots=True)
class _Fold:
    """Of a sum: its magnitudes, its largest number of terms, and what all of them are multiples of; 0: of nothing."""

    magnitudes: torch.Tensor
    terms: float
    quantum: float


class ReferenceRuns:
    """Evaluates a reference: in its own dtype, in float64, and in float64 with random rounding after each op. Lazily,
    each once.

    Each run has copies of the arguments. Generators are restored. Gradients may be taken inside, if they are on where
    this is made.

    Args:
        reference: plain torch; returns tensors, possibly nested.
        args, kwargs: of the reference.
        seed: of random rounding.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int = 1337,
    ) -> None:
        self._reference, self._given, self._seed = reference, [tuple(args), dict(kwargs or {})], seed
        self._grad = torch.is_grad_enabled()
        self._seen = _DtypeMode()
        self._folds: dict[tuple[Any, int], tuple[_Fold, ...]] = {}
        self._samples: dict[tuple[Rounding, torch.dtype, int, float], tuple[torch.Tensor, ...]] = {}
        self.fallbacks: Counter[str] = Counter()
        """Calls of each op that float64 was not possible for; known after :attr:`exact`."""

    @functools.cached_property
    def own(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the result in order, in the reference's own dtype.

        Raises:
            NotJudgedError: it draws random numbers, or a result is not strided.
            Exception: whatever the reference raises.
        """
        with unobserved(), preserved_rng():
            before = random_states(None, outside_torch=True)
            results = self._results(self._seen, _copied)
            drawn = states_differ(before, random_states(None, outside_torch=True))
        if drawn or self._seen.drawn:
            op = self._seen.drawn or "a generator"
            raise NotJudgedError(f"the reference draws random numbers ({op}): pass them as an argument, as a mask")
        for result in results:
            if result.layout is not torch.strided or result.is_meta or result.is_quantized:
                raise NotJudgedError(f"the reference returns a tensor without plain values ({result.layout})")
        return results

    @functools.cached_property
    def exact(self) -> tuple[torch.Tensor, ...]:
        """The same in float64 or complex128; integers and bools as they are.

        Raises:
            NotJudgedError: it raises in float64, or its results have other shapes there.
        """
        own, mode = self.own, WideMode()
        results = self._wide(mode)
        self.fallbacks += mode.fallbacks
        if [item.shape for item in results] != [item.shape for item in own]:
            raise NotJudgedError("the reference returns other shapes in float64")
        return results

    @functools.cached_property
    def lowest(self) -> torch.dtype:
        """The dtype with the largest unit roundoff of those that ops and results of the reference have."""
        seen = {dtype for item in self._seen.dtypes.values() for dtype in item} | {item.dtype for item in self.own}
        return max((dtype for dtype in seen if dtype in _COUNTED), key=unit_roundoff, default=torch.float32)

    def rounded(
        self, rounding: Rounding, wide: torch.dtype, seed: int = 0, scale: float = 1.0
    ) -> tuple[torch.Tensor, ...]:
        """Return the results in float64 with random rounding.

        Args:
            rounding: what is rounded.
            wide: dtype that sums accumulate in, float32 or float64.
            seed: each has other directions of rounding.
            scale: units of roundoff by which rounding changes a value.

        Raises:
            NotJudgedError: it raises so, or has other shapes.
        """
        key = rounding, wide, seed, scale
        if key not in self._samples:
            own = self.own
            mode = _RoundingMode(self, rounding, wide, RandomRounding(self._seed + seed), scale)
            with sdpa_kernel(SDPBackend.MATH):
                results = self._wide(mode)
            if [item.shape for item in results] != [item.shape for item in own]:
                raise NotJudgedError("the reference returns other shapes where it is rounded")
            with untraced():
                self._samples[key] = tuple(map(_known, results, own, self.exact))
        return self._samples[key]

    def _wide(self, mode: WideMode) -> tuple[torch.Tensor, ...]:
        try:
            with unobserved(), preserved_rng(), default_dtype(torch.float64):
                return self._results(mode, _widened_copy)
        except Exception as error:  # of any kind: a kernel lacks for float64, memory
            raise NotJudgedError(f"the reference has no value in float64: {named_line(error, limit=200)}") from error

    def _results(self, mode: TorchDispatchMode, change: Callable[[Any], Any]) -> tuple[torch.Tensor, ...]:
        with unobserved(), torch.set_grad_enabled(self._grad):
            args, kwargs = mapped(self._given, change)
            with mode:
                results = self._reference(*args, **kwargs)
            return tuple(tensor.detach().resolve_conj().resolve_neg() for tensor in tensors_in(results))


def _known(sample: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return a sample without what left the range of the dtype in it alone: that would explain any error."""
    if not (sample.is_floating_point() or sample.is_complex()) or bool(sample.sum().isfinite()):
        return sample
    return torch.where(~sample.isfinite() & own.isfinite() & exact.isfinite(), exact, sample)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return cloned(leaf)


def _widened_copy(leaf: Any) -> Any:
    return cloned(leaf, WIDER.get(leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf


class _DtypeMode(TorchDispatchMode):
    """Note the dtypes of the results of each call of each op, and whether one draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[tuple[Any, int], tuple[torch.dtype, ...]] = {}
        self.shapes: dict[tuple[Any, int], list[torch.Size]] = {}
        self.drawn = ""
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the op and note."""
        kwargs = dict(kwargs or {})
        seeded = plan_of(func).seeded
        before = generator_digest(args, kwargs) if seeded else 0
        output = func(*args, **kwargs)
        if seeded and generator_digest(args, kwargs) != before:  # an op with a probability of zero draws nothing
            self.drawn = str(func)
        key = func, self._calls[func]
        self._calls[func] += 1
        self.dtypes[key] = tuple(tensor.dtype for tensor in tensors_in(output))
        self.shapes[key] = [tensor.shape for tensor in tensors_in(output)]
        return output


class _RoundingMode(WideMode):
    """Compute in float64 and round what each op writes."""

    def __init__(
        self, runs: ReferenceRuns, rounding: Rounding, wide: torch.dtype, noise: RandomRounding, scale: float
    ) -> None:
        super().__init__()
        self._seen, self._shapes, self._folds = runs._seen.dtypes, runs._seen.shapes, runs._folds
        lowest = [item.dtype for item in runs.own if item.dtype in WIDER]
        self._default = max(lowest, key=unit_roundoff, default=wide)
        self._rounding, self._accumulate, self._noise, self._scale = rounding, wide, noise, scale
        self._calls: Counter[Any] = Counter()
        self._inside: list[tuple[Any, int]] = []  # calls that are being decomposed
        self._whole: set[Any] = set()  # ops whose decomposition failed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the op, or its steps, and round what it wrote."""
        with untraced():
            args, kwargs = mapped(tuple(args), self._wide), dict(kwargs or {})
        key = (*self._inside, (func, self._calls[func, *self._inside]))
        self._calls[func, *self._inside] += 1
        own = self._own_dtypes(key, func, kwargs)
        kwargs = mapped(kwargs, self._wide)
        output = self._stepwise(func, args, kwargs, key[-1])
        if output is NotImplemented:
            args = self._rounded_argument(func, args)
            output = super().__torch_dispatch__(func, types, args, kwargs)
        plan = plan_of(func)
        if plan.blank or plan.pattern is Pattern.VIEW or (own and not own[0]):
            return output
        with untraced():
            for position, tensor in enumerate(plan.written_by(args, kwargs, output)):
                if tensor.dtype in (torch.float64, torch.complex128) and tensor.numel() and not tensor.is_meta:
                    dtype = own[position] if position < len(own) else None
                    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
                        dtype = self._default
                    self._round(tensor, dtype, func, args, kwargs, key, position)
        return output

    def _own_dtypes(self, key: tuple[Any, ...], func: Any, kwargs: Mapping[str, Any]) -> tuple[torch.dtype | None, ...]:
        """Return the dtypes that a call has in the reference's own run; ``None``: it rounds nothing."""
        if self._rounding is Rounding.ACCUMULATION:
            return (self._accumulate,)
        if self._inside and self._rounding is Rounding.EACH_OP:
            return (self._accumulate,)
        if self._inside:
            return (next(iter(self._seen.get(self._inside[0], ())), None),)
        if func is torch.ops.aten._to_copy.default:
            return (kwargs.get("dtype"),)
        return self._seen.get(key[-1], ())

    def _stepwise(self, func: Any, args: Any, kwargs: Any, call: tuple[Any, int]) -> Any:
        steps = None if func in self._whole else _steps_of(func)
        if steps is None or len(self._inside) > 3:
            return NotImplemented
        self._inside.append(call)
        try:
            with self:
                output = steps(*args, **kwargs)
        except Exception:  # a decomposition that does not hold for these arguments
            output = NotImplemented
        finally:
            self._inside.pop()
        known = self._inside or self._shapes.get(call) in (None, [tensor.shape for tensor in tensors_in(output)])
        if output is NotImplemented or not known:  # some have other shapes of results that nobody reads
            self._whole.add(func)
            return NotImplemented
        return output

    def _rounded_argument(self, func: Any, args: Any) -> Any:
        if _aten_name(func) not in _SENSITIVE or args[0].dtype is not torch.float64:
            return args
        with untraced():
            return (self._noise.moved(args[0], unit_roundoff(self._accumulate) * self._scale / 2), *args[1:])

    def _round(
        self, tensor: torch.Tensor, dtype: torch.dtype, func: Any, args: Any, kwargs: Any, key: Any, position: int
    ) -> None:
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dtype = dtype.to_real()
        low = self._rounding is Rounding.LOW_ACCUMULATION and not self._inside
        inner = dtype if low else self._accumulate
        if unit_roundoff(inner) > unit_roundoff(dtype):
            inner = dtype
        folds = self._folds_of(func, args, kwargs, key)
        unit = unit_roundoff(inner) * self._scale
        if position < len(folds) and folds[position].magnitudes.shape == tensor.shape:
            fold = folds[position]
            exact = fold.magnitudes * unit <= fold.quantum
            amount = (fold.magnitudes + math.sqrt(fold.terms / 3) * tensor.abs()).mul_(unit * (_PART if low else 1.0))
            if tensor.is_complex():
                amount, exact = amount.unsqueeze(-1), exact.unsqueeze(-1)
            real.add_(self._noise.signs(real).mul_(amount).masked_fill_(exact, 0.0))
        elif (terms := folded_terms(func, next(iter(tensors_in(args)), None), tensor)) > 1:
            exact = real.to(dtype) == real
            moved = self._noise.moved(real, min(unit * math.sqrt(terms), 0.5))
            real.copy_(torch.where(exact, real, moved))
        if self._scale == 1.0:
            moved = self._noise.moved(real, unit_roundoff(dtype) / 2)
            real.copy_(moved.to(dtype))
        else:
            exact = real.to(dtype) == real
            real.copy_(torch.where(exact, real, self._noise.moved(real, min(unit_roundoff(dtype) * self._scale, 0.5))))

    def _folds_of(self, func: Any, args: Any, kwargs: Any, key: Any) -> tuple[_Fold, ...]:
        if _aten_name(func) not in _SUMS:
            return ()
        if key not in self._folds:
            self._folds[key] = _folds(func, args, kwargs)
        return self._folds[key]


def _folds(func: Any, args: Any, kwargs: Any) -> tuple[_Fold, ...]:
    """Return the sums of magnitudes of an op that sums products."""
    try:
        magnitudes = tensors_in(func(*mapped(args, _magnitude), **mapped(kwargs, _magnitude)))
        terms = tensors_in(func(*mapped(args, _one), **mapped(kwargs, _one)))
    except Exception:  # the op has no kernel for these arguments in float32
        return ()
    quantum = math.prod(_quantum(tensor) for tensor in tensors_in([args, kwargs]))
    if _aten_name(func) in _MEANS:  # they divide the sum by the number of its terms
        first = next(iter(tensors_in(args)))
        quantum /= max(1, *(first.numel() // max(1, item.numel()) for item in magnitudes))
        terms = [torch.full((), first.numel() / max(1, item.numel())) for item in magnitudes]
    return tuple(
        _Fold(size, max(1.0, float(count.max())), quantum)
        for size, count in zip(magnitudes, terms, strict=True)
        if size.numel()
    )


def _quantum(tensor: torch.Tensor) -> float:
    """Return a power of two that all elements are multiples of, 1 at most; 0 if 2**-24 is too large."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 1.0
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for bits in (24, 16, 8, 0):
        if not bool(((parts * 2.0**bits).frac() == 0).all()):
            return 0.0 if bits == 24 else 2.0 ** -(bits + 8)
    return 1.0


def _magnitude(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return torch.float32
    if isinstance(leaf, float):
        return abs(leaf)
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    return leaf.abs().to(torch.float32)


def _one(leaf: Any) -> Any:
    found = _magnitude(leaf)
    return found.fill_(1) if isinstance(found, torch.Tensor) and found.is_floating_point() else found


@functools.cache
def _aten_name(func: Any) -> str:
    """Return the name of an op of torch's own, ``sum``; empty for those of other libraries."""
    space, _, name = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
    return name if space in ("aten", "prims") else ""


@functools.cache
def _steps_of(func: Any) -> Callable[..., Any] | None:
    """Return the decomposition of an op into steps that a kernel takes; ``None`` of an op that is one step."""
    from torch._decomp import decomposition_table

    name = _aten_name(func)
    if not name or name in _SUMS or plan_of(func).pattern is Pattern.VIEW:
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose  # type: ignore[no-any-return]
    if name in _VARIANCES and func._overloadname == "correction":
        return functools.partial(_variance, name)
    return decomposition_table.get(func) if name in _COMPOSED else None


_VARIANCES = ("var", "std", "var_mean", "std_mean")


def _variance(name: str, x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Compute what ``torch.var`` and its relatives do, in two passes."""
    dims = list(dim) if dim else list(range(x.dim()))
    mean = x.mean(dims, keepdim=True)
    terms = math.prod(x.shape[each] for each in dims)
    found = (x - mean).abs().square().sum(dims, keepdim=keepdim)
    found = found / max(0.0, terms - (1 if correction is None else correction))
    if name.startswith("std"):
        found = found.sqrt()
    return (found, mean if keepdim else mean.squeeze(dims)) if name.endswith("mean") else found
