"""Pipelines: by messages of one's own, and a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.extensions.ranks.programs.base import (
    HIDDEN,
    NARROW,
    WIDE,
    Program,
    Racy,
    Results,
    Run,
    at,
    batch,
    parameters_of,
    sgd,
)


def stage_of(rank: int) -> nn.Sequential:
    """The layers of a rank."""
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Linear(WIDE, HIDDEN), Racy(), nn.ReLU())
    return nn.Sequential(nn.Linear(HIDDEN, NARROW), Racy())


def by_hand(run: Run) -> Results:
    """Activations sent to rank 1, their gradient back to rank 0."""
    run.arm(rank=1, call=1)
    stage = stage_of(run.rank)
    optimizer = sgd(stage.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        if run.rank == 0:
            made = stage(batch(0, iteration))
            dist.send(made.detach(), 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, 1)
            made.backward(gradient)
        else:
            x = torch.empty(4, HIDDEN)
            dist.recv(x, 0)
            stage(x.requires_grad_()).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
        optimizer.step()
    return parameters_of(stage)


def one_forward_one_backward(run: Run) -> Results:
    """1F1B with four parts of a batch; shapes are inferred by a run on memory that nobody wrote."""
    run.disarm()
    stage = stage_of(run.rank)
    optimizer = sgd(stage.parameters())
    staged = PipelineStage(stage, run.rank, run.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(staged, n_microbatches=4, loss_fn=lambda made, wanted: (made - wanted).square().mean())
    for iteration in range(2):
        run.disarm()
        if iteration == 1:
            run.arm(rank=0, call=2)
        optimizer.zero_grad()
        if run.rank == 0:
            schedule.step(batch(0, iteration, rows=8))
        else:
            schedule.step(target=batch(1, iteration, rows=8)[:, :NARROW].contiguous())
        optimizer.step()
    return parameters_of(stage)


PROGRAMS = {
    "pipeline_by_hand": Program(by_hand, truth=at(1, module="1")),
    "pipeline_1f1b": Program(one_forward_one_backward, truth=at(0, module="1")),
}
