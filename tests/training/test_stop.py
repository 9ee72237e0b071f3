"""A run ends when it is told to, or when its launcher has gone; not when a shell has."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from bert_ds.training.stop import StopRequest

CPU = torch.device("cpu")


def test_a_signal_is_noted_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(watch_parent=False) as stop:
        assert stop.agreed(CPU, 1).signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(CPU, 1).signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("watch_parent", "answer"), [(True, signal.SIGTERM), (False, None)])
def test_the_end_of_the_parent(watch_parent: bool, answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 4321)
    stop = StopRequest(watch_parent=watch_parent)
    assert stop.agreed(CPU, 1).signal is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.agreed(CPU, 1).signal is answer
