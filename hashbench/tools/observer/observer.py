"""The observer: collects the observations of one run, and in a check puts saved values back and compares; and the trace
that reports every op to it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from hashbench.core.errors import HashbenchError
from hashbench.core.records import OpRecord
from hashbench.core.report.compare import EnvironmentChange, environment_changes
from hashbench.core.run.environment import collect
from hashbench.core.run.leaves import NotComparableError, flatten
from hashbench.core.run.outputs import logical_value
from hashbench.core.run.settings import settings
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import caller_line, tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import digest, dtype_name, python_digest, unobserved, untraced, without_repetition
from hashbench.core.trace.file import refuse_different
from hashbench.core.trace.mode import TracingMode
from hashbench.core.trace.op_schema import Pattern, plan_of
from hashbench.tools.observer import files
from hashbench.tools.observer.recording import (
    Mismatch,
    Observation,
    PutBack,
    Recording,
    Saved,
    mismatches,
    newest_mismatch,
    table,
)

log = logging.getLogger(__name__)

_MARK = "observe_non_deterministic"


class MismatchError(RuntimeError):
    """An observation does not match the reference, with ``raise_on_mismatch``; ``mismatch`` says which and how."""

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch


class Observer:
    """What one ``ObserverContext`` collects. Its methods are those of the module, for this observer.

    Where there is a reference, ``mismatches`` compares with it: during the region what was observed so far, after it
    all, also what is missing. ``observations`` are this run's, in order, ``put_back`` the values that came from
    the reference, ``environment_changes`` what is another machine or setting than in the reference run.

    Args:
        run: the name of the run.
        reference_hash_file: the JSON file of the run to compare with.
        raise_on_mismatch: raise :class:`MismatchError` at the first mismatch, where it happens.

    Raises:
        HashbenchError: the reference is missing, damaged, of another version, of another tracer, or of a run that ended
            with an error.
    """

    def __init__(
        self, run: str, reference_hash_file: str | Path | None = None, raise_on_mismatch: bool = False
    ) -> None:
        self.run = run
        self.raise_on_mismatch = raise_on_mismatch
        self.is_verification_run = reference_hash_file is not None
        self.hash_mode = HashMode()
        self.hash_mode.register_observer(self)
        self._reference, self._values = Recording("", ()), MarkedValues()
        if reference_hash_file is not None:
            self._reference, tensors = files.read_reference(reference_hash_file)
            saved = {seen.record.id: seen.saved for seen in self._reference.observations if seen.saved}
            self._values = MarkedValues(saved, tensors)
        self.environment = _environment(self.hash_mode.tracer)
        if self.is_verification_run:
            names = (f"the reference {self._reference.name}", "the hash mode here")
            tracer = str(self._reference.environment.get("tracer", "unknown"))
            refuse_different(tracer, self.hash_mode.tracer, names=names)
        self._observations: list[Observation] = []
        self._counts: Counter[str] = Counter()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._marking = self._marked = 0  # regions that are open, and ops in them so far
        self._exchanged: tuple[tuple[Saved, ...], str] = (), ""  # of the op whose record is made next
        self._in_step = True
        self._finished = False
        self._final: dict[str, Mismatch] | None = None

    # ------------------------------------------------------------------------------------------------ observing

    @property
    def observations(self) -> tuple[Observation, ...]:
        """This run's, in order."""
        return tuple(self._observations)

    @property
    def put_back(self) -> list[PutBack]:
        """Values that came from the reference, in order."""
        return self._values.put_back

    @property
    def saved_tensors(self) -> list[torch.Tensor]:
        """Values that a reference run saved, in order, on the CPU."""
        return self._values.saved

    def observe(self, kind: str, value: Any) -> None:
        """Record the digests of all tensors, and the plain values, in ``value``, any nesting of them."""
        self._add(self._numbered(kind), f"observe {kind}", value, source=caller_line(sys._getframe(1)))

    def observe_grad(self, kind: str, tensor: torch.Tensor) -> None:
        """Record the digest of the gradient of ``tensor`` when it is computed, under the name ``<kind>_grad``."""
        source, name = caller_line(sys._getframe(1)), f"{kind}_grad"
        self._hook(kind, tensor, lambda grad: self._add(self._numbered(name), f"observe {name}", grad, source=source))

    def observe_non_deterministic(self, name: str, tensor: Any) -> Any:
        """Mark a tensor, or any nesting of tensors, as nondeterministic.

        The reference run saves it. A check puts the saved value in its place, in memory, so that everything that
        shares the memory has it too; where its elements share memory with each other as they did not in the
        reference run, it is replaced in what is returned. Either way gradients flow as before. What has another shape
        or dtype than in the reference run is left as it is, which is a mismatch.

        Returns:
            ``tensor``, with the value of the reference run in a check.
        """
        source = caller_line(sys._getframe(1))
        leaves, structure = tree_flatten(tensor)
        numbers = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if any(tensors_in(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)):
            raise _cannot_observe(name, "a tensor in it cannot be put back, for an object of another kind holds it")
        unique, op = self._numbered(name), f"{_MARK} {name}"
        with untraced():
            old = [leaves[number] for number in numbers]
            new, saved, note = self._values.exchange(_id(op, unique), old, in_place=True, name=unique)
        for number, replacement in zip(numbers, new, strict=True):
            if replacement is not leaves[number]:
                with unobserved():
                    leaves[number] = _Substitute.apply(leaves[number], replacement)
        value = tree_unflatten(leaves, structure)
        self._add(unique, op, value, source=source, saved=saved, note=note)
        return value

    def observe_non_deterministic_grad(self, name: str, tensor: torch.Tensor) -> str:
        """Mark the gradient of ``tensor`` as nondeterministic: the reference run saves it, a check puts it back.

        Returns:
            The name that the gradient goes by: ``<name>_grad``.
        """
        source = caller_line(sys._getframe(1))
        grad_name = f"{name}_grad"

        def exchange(grad: torch.Tensor) -> torch.Tensor:
            unique, op = self._numbered(grad_name), f"{_MARK} {grad_name}"
            with untraced():  # a hook must not write to the gradient it gets
                (new,), saved, note = self._values.exchange(_id(op, unique), [grad], in_place=False, name=unique)
            self._add(unique, op, new, source=source, saved=saved, note=note)
            return new

        self._hook(name, tensor, exchange)
        return grad_name

    def _hook(self, name: str, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        if tensor.requires_grad:
            self._hooks.append(tensor.register_hook(hook))
        else:
            log.warning("%s needs no gradient, so none is observed", name)

    @contextlib.contextmanager
    def marking_non_deterministic(self) -> Iterator[None]:
        """Open a region in which what every op under the hash mode writes is marked as nondeterministic: saved in the
        reference run, put in its place, in memory, in a check. Backward ops count where the backward runs in it."""
        before = self._marked
        self._marking += 1
        try:
            yield
        finally:
            self._marking -= 1
            if self._marked == before:
                log.warning("no op was marked as nondeterministic: the hash mode is off, or no op ran")

    # ------------------------------------------------------------------------------------------- ops under the mode

    def enable_mode(self) -> None:
        """Observe every op from now on; ``with observer.hash_mode:`` does so for a block."""
        self.hash_mode.enable()

    def disable_mode(self) -> None:
        """Observe ops no longer; see :meth:`HashMode.disable`."""
        self.hash_mode.disable()

    def op_wrote(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        """Take the outputs of an op from the hash mode, before they are hashed."""
        self._exchanged = (), ""
        if self._marking and tensors:
            self._marked += 1
            self._exchanged = self._values.exchange(node, tensors, in_place=True)[1:]

    def op_recorded(self, record: OpRecord) -> None:
        """Take the record of an op from the hash mode."""
        saved, note = self._exchanged
        self._exchanged = (), ""
        name = self._numbered(f"__torch_dispatch__{record.op.partition('.')[2] or record.op}")
        self._append(Observation(name, record, saved, note))

    # ----------------------------------------------------------------------------------------------------- records

    def _numbered(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}_{self._counts[kind]}"

    def _add(
        self, name: str, op: str, value: Any, *, source: str, saved: tuple[Saved, ...] = (), note: str = ""
    ) -> None:
        self._append(Observation(name, _record_of(name, op, value, source), saved, note))

    def _append(self, observation: Observation) -> None:
        self._observations.append(observation)
        if self.is_verification_run and self.raise_on_mismatch and self._in_step:
            mismatch = newest_mismatch(self._reference.observations, self._observations)
            if mismatch is not None:
                self._in_step = mismatch.reference_index is not None
                raise MismatchError(mismatch)

    # --------------------------------------------------------------------------------------------------- comparing

    @property
    def mismatches(self) -> dict[str, Mismatch]:
        """All mismatches so far, by name, in order; empty without a reference. The name is that of this run's
        observation; ``reference:<name>`` stands for what is missing."""
        if not self.is_verification_run:
            return {}
        if self._final is None or not self._finished:
            self._final = mismatches(self._reference.observations, self._observations, finished=self._finished)
        return self._final

    @property
    def environment_changes(self) -> tuple[EnvironmentChange, ...]:
        """What of the machine and of torch's settings is another than in the reference run; empty without one."""
        if not self.is_verification_run:
            return ()
        return environment_changes([self._reference.environment], [self.environment])

    def report_mismatches(self) -> bool:
        """Log the mismatches as a table, with what is another in this environment and which values were put back.
        Returns whether there are none. Without a reference nothing was compared, and that is what is logged."""
        if not self.is_verification_run:
            log.warning("%s was not compared with any reference", self.run)
            return True
        log.log(logging.WARNING if self.mismatches else logging.INFO, "%s", self.mismatch_table())
        return not self.mismatches

    def mismatch_table(self) -> str:
        """Return the table that :meth:`report_mismatches` logs."""
        return table(
            list(self.mismatches.values()),
            observed=len(self._observations),
            expected=len(self._reference.observations),
            changes=self.environment_changes,
            put_back=self.put_back,
        )

    def finish(self, error: BaseException | None = None) -> Recording:
        """End the run: what the reference has beyond it is missing from now on."""
        self._finished, self._final = error is None, None
        return Recording(
            self.run,
            self.observations,
            self.environment,
            checked=self.is_verification_run,
            put_back=len(self.put_back),
            error="" if error is None else f"{type(error).__name__}: {error}".rstrip(": "),
        )

    def cleanup(self) -> None:
        """Remove every hook and disable the mode; one that cannot be disabled reports no more ops."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self.disable_mode()
        finally:
            self.hash_mode.register_observer(None)


# -------------------------------------------------------------------------------------------- saving, putting back


class MarkedValues:
    """Values marked as nondeterministic: saved in a reference run (``kept`` is ``None``), put back in a check.

    Args:
        kept: what the reference saved, by the id of the record.
        tensors: its tensors, by :attr:`Saved.number`.
    """

    def __init__(
        self, kept: Mapping[str, tuple[Saved, ...]] | None = None, tensors: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.put_back: list[PutBack] = []
        self.saved: list[torch.Tensor] = []
        self._kept, self._tensors = kept, tensors or {}

    def exchange(
        self, node: str, tensors: Sequence[torch.Tensor], *, in_place: bool, name: str = ""
    ) -> tuple[list[torch.Tensor], tuple[Saved, ...], str]:
        """Save the tensors of the record ``node``, or put the saved ones in their place; call with dispatch modes off.

        Returns the tensors that hold the value now, what was saved, and why nothing could be put back.
        """
        copies = [files.savable(tensor, name or node) for tensor in tensors]
        if self._kept is None:
            return list(tensors), tuple(map(self._save, tensors, copies)), ""
        saved = self._kept.get(node, ())
        note = _misfit(saved, copies)
        if note:
            return list(tensors), (), note
        new, differed, moved = [], False, set()
        for tensor, copy, kept in zip(tensors, copies, saved, strict=True):
            content = self._tensors[kept.number]
            other = _bits(copy) != _bits(content)
            new.append(_with_content(tensor, content, in_place=in_place) if other else tensor)
            differed |= other
            if kept.device != str(tensor.device):
                moved.add(f"{kept.device} to {tensor.device}")
        self.put_back.append(PutBack(name or node, differed, ", ".join(sorted(moved))))
        return new, (), ""

    def _save(self, tensor: torch.Tensor, copy: torch.Tensor) -> Saved:
        self.saved.append(copy)
        return Saved(len(self.saved) - 1, dtype_name(copy.dtype), tuple(copy.shape), str(tensor.device))


def _record_of(name: str, op: str, value: Any, source: str) -> OpRecord:
    """Hash all parts of a named observation."""
    try:
        with untraced():
            parts = list(flatten(value, ""))
            digests = [digest(part) if isinstance(part, torch.Tensor) else python_digest(part) for _, part in parts]
    except NotComparableError as error:
        raise _cannot_observe(name, f"its bits cannot be compared: it{error}") from None
    return OpRecord(
        id=_id(op, name),
        phase="backward" if torch._C._current_autograd_node() is not None else "forward",
        iteration=None,
        module="",
        op=op,
        arguments=", ".join(path.removeprefix(".") for path, _ in parts),
        outputs=tuple(digests),
        source=source,
    )


def _id(op: str, name: str) -> str:
    """Return the id of the record of a named observation, by which its saved value is found again."""
    return f"{op}#{name}"


def _cannot_observe(name: str, reason: str) -> HashbenchError:
    return HashbenchError(f"cannot observe {name}", consequence=reason, tip="Observe the tensors in it.")


def _environment(tracer: str) -> Mapping[str, Any]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {**collect("cpu" if accelerator is None else accelerator.type, tracer=tracer), "settings": settings()}


def _misfit(saved: Sequence[Saved], tensors: Sequence[torch.Tensor]) -> str:
    """Explain why the saved tensors cannot be put in the place of these; empty where they can."""
    if not tensors:
        return "" if not saved else "this run has no tensor here, the reference saved some"
    if not saved:
        return "the reference saved no value for it"
    was = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in saved]
    now = [f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors]
    return "" if was == now else f"the reference saved {', '.join(was)}, here is {', '.join(now)}"


def _with_content(tensor: torch.Tensor, content: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """Return ``tensor`` itself with the content in its memory; a new tensor of the same strides where that cannot be:
    elements share memory in another way than they did, or torch forbids to write (a tensor of inference mode outside
    it)."""
    if in_place and (torch.is_inference_mode_enabled() or not tensor.is_inference()):
        once = content[tuple(slice(1) if not stride else slice(None) for stride in tensor.stride())]
        # Not detach(), which shares the version counter: what autograd saved of this memory is to have the content
        # too, as it had in the reference run.
        without_repetition(tensor.data).copy_(once)
        if _bits(tensor) == _bits(content):
            return tensor
    return torch.empty_like(tensor).copy_(content)


def _bits(tensor: torch.Tensor) -> str:
    """Return a digest of the bits in logical order, made on the host: those of different devices cannot be compared."""
    return logical_value(tensor.detach().cpu())


class _Substitute(torch.autograd.Function):
    """Another value in the place of a tensor; its gradient flows on to that tensor."""

    @staticmethod
    def forward(_context: Any, _tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        return content

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


# ---------------------------------------------------------------------------------------------- the dispatch mode


class HashMode(HashDebugTrace):
    """Hash what every dispatched op writes, and report each to the registered observer, in a ``with`` block.

    It is a :class:`~hashbench.core.trace.api.HashDebugTrace` by the Python dispatch mode, and sees what that sees.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        super().__init__(source_lines=True, watcher=_Relay(self), tracer="python")

    @property
    def enabled(self) -> bool:
        """Whether it is on."""
        return self.is_active()

    def register_observer(self, observer: Observer | None) -> None:
        """Report every op to this observer from now on."""
        self.observer = observer

    def enable(self) -> None:
        """Enter the mode; does nothing where it is on.

        Raises:
            HashbenchError: another trace is active in this thread.
        """
        if not self.enabled:
            self.__enter__()

    def disable(self) -> None:
        """Leave the mode; does nothing where it is off.

        Raises:
            HashbenchError: a mode that was entered later is on (nothing is changed then), or one that was entered
                earlier has been left, by which torch left this one.
        """
        self.__exit__(None, None, None)

    def __exit__(self, *exception: Any) -> None:
        if not self.enabled:
            return
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._tracer:
            super().__exit__(*exception)
        elif any(mode is self._tracer for mode in stack):
            raise HashbenchError(
                "cannot disable the hash mode while a dispatch mode is on that was entered after it",
                consequence="torch would leave that one in its place, so the hash mode stays on",
                tip="Leave that mode first, or use `with observer.hash_mode:`.",
            )
        else:
            assert isinstance(self._tracer, TracingMode)  # an observer sees each op before its record
            self._tracer.end(*exception)
            raise HashbenchError(
                "the hash mode was taken off the stack of dispatch modes",
                consequence="ops since then were not observed: a mode entered before it was left while it was on, and "
                "torch keeps that one on in its place",
                tip="Disable the hash mode before leaving modes that were entered before it, or use "
                "`with observer.hash_mode:`.",
            )


class _Relay(TraceCallback):
    """Tells the mode's observer what the trace tells."""

    wants_records = True

    def __init__(self, mode: HashMode) -> None:
        self._mode = mode

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._mode.observer is None:
            return
        plan = plan_of(func)
        computes = plan.pattern is not Pattern.VIEW and not plan.blank
        written = plan.written_by(args, kwargs, output) if computes else []
        self._mode.observer.op_wrote(node, list({id(tensor): tensor for tensor in written}.values()))

    def recorded(self, record: OpRecord) -> None:
        if self._mode.observer is not None:
            self._mode.observer.op_recorded(record)
