"""``WatchCallback`` for the ``Trainer`` of Lightning: :func:`hashbench.watch` from its first step to its last.

::

    trainer = lightning.Trainer(max_epochs=2, callbacks=[WatchCallback("runs/a")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from hashbench.extensions.watch.recorder import Watch, watch


class WatchCallback(Callback):  # type: ignore[misc]  # lightning is not analysed
    """Record a line of digests for each optimizer step.

    Args:
        folder: as for :func:`hashbench.watch`; default: ``watch`` in the trainer's root folder.
        generators, every, trace: as for :func:`hashbench.watch`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        generators: Mapping[str, Any] | None = None,
        every: int = 16,
        trace: range | Sequence[int] | int | None = None,
    ) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {"generators": generators, "every": every, "trace": trace}
        self._watch: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """Begin the recording, at the step of the checkpoint that the trainer goes on from."""
        self._stop()
        folder = Path(trainer.default_root_dir, "watch") if self._folder is None else self._folder
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        step, optimizers = trainer.global_step, trainer.optimizers
        made = watch(folder, model=pl_module, optimizer=optimizers, scaler=scaler, start=step, **self._options)
        made.start()
        self._watch = made

    def on_train_batch_start(self, _trainer: Any, _module: Any, batch: Any, _index: int) -> None:
        """Tell the batch: the trainer calls ``training_step``, not the module."""
        if self._watch is not None:
            self._watch.batch(batch)

    def on_train_end(self, _trainer: Any, _module: Any) -> None:
        """End the recording."""
        self._stop()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        """End the recording, with the exception."""
        self._stop(exception)

    def _stop(self, error: BaseException | None = None) -> None:
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.stop(error)
