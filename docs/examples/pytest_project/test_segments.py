"""What its authors check in their own CI."""

import pytest
import torch
from segments import Pooling, segment_mean, with_noise


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 8), torch.arange(64) % 5


def test_the_op_gives_the_same_in_every_run(assert_runs_equal, rows):
    means = assert_runs_equal(segment_mean, *rows, count=5)
    assert means.shape == (5, 8)


def test_so_does_its_gradient(assert_runs_equal, rows):
    values, segments = rows

    def gradient(values):
        segment_mean(values, segments, 5).square().sum().backward()
        return values.grad

    assert_runs_equal(gradient, values.requires_grad_())


@pytest.mark.run_to_run(runs=5)
@pytest.mark.parametrize("foreach", [True, False])
def test_training_gives_the_same_model(rows, foreach):
    values, segments = rows
    model = Pooling(8, 5)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    for _ in range(3):
        optimizer.zero_grad()
        model(values, segments).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.run_to_run(deterministic="on")
def test_with_the_settings_of_a_reproducible_training(rows):
    return segment_mean(*rows, 5)


@pytest.mark.xfail(reason="with_noise draws from NOISE, which nobody resets", strict=True)
def test_known_difference(assert_runs_equal, rows):
    assert_runs_equal(with_noise, rows[0])
