"""Ctrl-C is raised where it is allowed, and waits everywhere else."""

from __future__ import annotations

import os
import signal

import pytest

from hashbench.processes import Interrupts


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_raised_where_it_is_allowed():
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.allowed():
        press_ctrl_c()


def test_ctrl_c_elsewhere_waits_until_it_is_allowed():
    done = []
    with Interrupts() as interrupts:
        press_ctrl_c()
        done.append("a file is whole")
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            done.append("never")
        press_ctrl_c()
        done.append("the clean-up is whole")
    assert done == ["a file is whole", "the clean-up is whole"]


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
