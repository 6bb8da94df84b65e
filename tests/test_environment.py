"""What of a machine counts."""

from __future__ import annotations

from hashbench.environment import variables_that_matter


def test_variables_of_libraries_count_but_not_which_accelerator_was_handed_out():
    variables = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3", "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/root"}
    assert variables_that_matter(variables) == {"CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "2"}
