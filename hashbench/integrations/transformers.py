"""``WatchCallback`` for the ``Trainer`` of transformers: :func:`hashbench.watch` from its first step to its last.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[WatchCallback("runs/a")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hashbench.extensions.watch.recorder import Watch, watch


class WatchCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not analysed
    """Record a line of digests for each optimizer step.

    Args:
        folder: as for :func:`hashbench.watch`; default: ``watch`` in the trainer's output folder.
        scaler, generators, every, trace: as for :func:`hashbench.watch`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        scaler: Any = None,
        generators: Mapping[str, Any] | None = None,
        every: int = 16,
        trace: range | Sequence[int] | int | None = None,
    ) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {"scaler": scaler, "generators": generators, "every": every, "trace": trace}
        self._watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, _control: Any, **more: Any) -> None:
        """Begin the recording, at the step of the checkpoint that the trainer goes on from."""
        self._stop()
        model: torch.nn.Module = more["model"]
        optimizer = more.get("optimizer")
        folder = Path(args.output_dir, "watch") if self._folder is None else self._folder
        made = watch(folder, model=model, optimizer=optimizer, start=state.global_step, **self._options)
        made.start()
        self._watch = made

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """End the recording."""
        self._stop()

    def _stop(self) -> None:
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.stop()
