"""Tiny trainings with transformers, Lightning and accelerate: functions of a plan, so that two calls make the same run,
and one with a planted difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from extensions.watch.loops import Net, Plan, race

EPOCH = 12
"""Optimizer steps in an epoch."""


class Planted(torch.nn.Module):
    """:class:`Net` with a loss, and the planted difference of its plan in one call."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.calls, self.net = plan, 0, Net()

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        step = self.calls // self.plan.accumulate
        planted = self.plan.fault if self.training and step == self.plan.at else ""
        self.calls += self.training
        with race(planted == "kernel"):
            loss = self.net(x).float().square().mean()
        return {"loss": loss}


class Items(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Items of random numbers; ``data order`` exchanges two items of different batches in the given order."""

    def __init__(self, plan: Plan, batch: int = 8) -> None:
        drawn = torch.randn(EPOCH * batch * plan.accumulate, 6, generator=torch.Generator().manual_seed(1))
        if plan.fault == "data order":
            at, next_batch = plan.at * batch * plan.accumulate, (plan.at * plan.accumulate + 1) * batch
            drawn[[at, next_batch]] = drawn[[next_batch, at]]
        self.drawn = drawn

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.drawn[index]}


def optimizer_of(model: torch.nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """Return an optimizer with momentum; ``order`` hands it the parameters in another order, as a set may."""
    parameters = list(model.parameters())
    if plan.fault == "order":
        parameters.reverse()
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# ------------------------------------------------------------------------------------------------------- transformers


def with_transformers(folder: Path, plan: Plan, *, resume: str | None = None, output: Path | None = None) -> None:
    """Train with ``transformers.Trainer``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hashbench.integrations.transformers import WatchCallback

    class Plant(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **more: Any) -> None:
            if state.global_step == plan.at:
                if plan.fault == "generator":
                    torch.rand(1)
                if plan.fault == "optimizer state":
                    more["optimizer"].state.clear()

    class Sequential(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(output or folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=plan.accumulate,
        max_grad_norm=0.1 if plan.clip else 0.0,
        max_steps=plan.steps,
        learning_rate=0.05,
        bf16=plan.amp,
        use_cpu=True,
        save_strategy="steps",
        save_steps=5,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=3,
        dataloader_num_workers=plan.workers,
    )
    torch.manual_seed(0)
    model = Planted(plan)
    trainer = Sequential(
        model,
        arguments,
        train_dataset=Items(plan),
        callbacks=[Plant(), WatchCallback(folder)],
        optimizers=(optimizer_of(model, plan), None),
    )
    trainer.train(resume_from_checkpoint=resume)


# ---------------------------------------------------------------------------------------------------------- Lightning


def with_lightning(folder: Path, plan: Plan, *, resume: str | None = None, output: Path | None = None) -> None:
    """Train with ``lightning.Trainer``."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hashbench.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Planted(plan)

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, plan)

        def on_train_batch_start(self, _batch: Any, index: int) -> None:
            first = self.trainer.global_step == plan.at and index % plan.accumulate == 0
            if first and plan.fault == "optimizer state":
                self.optimizers().optimizer.state.clear()

    class Plant(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if plan.fault == "generator" and trainer.global_step == plan.at:
                torch.rand(1)

    torch.manual_seed(0)
    root = output or folder
    trainer = lightning.Trainer(
        default_root_dir=root,
        max_steps=plan.steps,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=plan.accumulate,
        gradient_clip_val=0.1 if plan.clip else None,
        precision="bf16-mixed" if plan.amp else "32-true",
        callbacks=[Plant(), WatchCallback(folder), ModelCheckpoint(root, every_n_train_steps=5, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Items(plan), batch_size=8, num_workers=plan.workers)
    trainer.fit(Module(), loader, ckpt_path=resume)


# --------------------------------------------------------------------------------------------------------- accelerate


def with_accelerate(folder: Path, plan: Plan, *, resume: str | None = None, output: Path | None = None) -> None:
    """Train with a loop around ``accelerate``; only :func:`hashbench.watch` is added."""
    import accelerate

    import hashbench

    assert resume is output is None
    torch.manual_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier plan in this process
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=plan.accumulate, mixed_precision="bf16" if plan.amp else "no"
    )
    model = Planted(plan)
    loader = torch.utils.data.DataLoader(Items(plan), batch_size=8, num_workers=plan.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, plan), loader)
    step = 0
    with hashbench.watch(folder, model=model, optimizer=optimizer):
        while step < plan.steps:
            for batch in loader:
                first = model.calls % plan.accumulate == 0
                if step == plan.at and first and plan.fault == "generator":
                    torch.rand(1)
                if step == plan.at and first and plan.fault == "optimizer state":
                    optimizer.optimizer.state.clear()
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if plan.clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                step += accelerator.sync_gradients
                if step == plan.steps:
                    break


TRAINERS = {"transformers": with_transformers, "lightning": with_lightning, "accelerate": with_accelerate}
