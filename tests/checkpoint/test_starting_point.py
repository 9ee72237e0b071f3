"""Which checkpoint a run starts from: the newest, one by its iteration, its own after an interruption, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.checkpoint.format import KINDS, WEIGHT
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.starting_point import StartingPoint, folder_to_start_from
from bert_ds.config.output import OutputConfig
from bert_ds.errors import CheckpointError
from tests.checkpoint.saved_checkpoints import model_config, random_tensors, save

CONFIG = model_config()
TENSORS = random_tensors(CONFIG)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 100 and 200."""
    folder = tmp_path_factory.mktemp("former")
    for step in (100, 200):
        save(folder, CONFIG, TENSORS, step=step)
    return folder


def output(load: Path, save_to: Path | None = None, **settings: object) -> OutputConfig:
    return OutputConfig(load=str(load), save=None if save_to is None else str(save_to), **settings)  # type: ignore


def test_the_newest_or_the_one_that_is_named(former: Path) -> None:
    assert folder_to_start_from(output(former)) == (former / "iter_0000200", True)
    assert folder_to_start_from(output(former, ckpt_step=100)) == (former / "iter_0000100", True)
    assert folder_to_start_from(output(former / "iter_0000100")) == (former / "iter_0000100", True)
    assert folder_to_start_from(OutputConfig()) is None
    with pytest.raises(CheckpointError, match=r"output.ckpt_step=150: .* iterations 100, 200. Fix: .*--ckpt-step"):
        folder_to_start_from(output(former, ckpt_step=150))
    with pytest.raises(CheckpointError, match=r"output\.load"):
        folder_to_start_from(output(former / "nowhere", ckpt_step=150))


def test_where_there_is_none(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    assert folder_to_start_from(output(fresh, fresh)) is None
    with pytest.raises(CheckpointError, match=r"is no folder\. Fix: .*--exit-on-missing-checkpoint"):
        folder_to_start_from(output(fresh, fresh, exit_on_missing_checkpoint=True))
    with pytest.raises(CheckpointError, match=r"is no folder\. Fix: .*--load"):
        folder_to_start_from(output(fresh, tmp_path / "other"))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        folder_to_start_from(output(tmp_path, tmp_path / "other", finetune=True))


def test_finetuning_starts_from_the_weights_and_goes_on_from_its_own(former: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    finetune = output(former, own, finetune=True, ckpt_step=100)
    assert folder_to_start_from(finetune) == (former / "iter_0000100", False)
    save(own, CONFIG, TENSORS, step=7)
    assert folder_to_start_from(finetune) == (own / "iter_0000007", True)


def test_weights_without_moments_are_not_resumed_by_mistake(former: Path, tmp_path: Path) -> None:
    whole = Checkpoint.open(former / "iter_0000100")
    weights = Checkpoint.open(save(tmp_path, CONFIG, random_tensors(CONFIG, kinds=(WEIGHT,))))
    assert (whole.manifest.kinds, weights.manifest.kinds) == (KINDS, (WEIGHT,))
    assert not list(StartingPoint(whole, continues=True, with_optimizer=True).problems())
    assert not list(StartingPoint(weights, continues=True, with_optimizer=False).problems())
    (problem,) = StartingPoint(weights, continues=True, with_optimizer=True).problems()
    assert "--no-load-optim" in problem.repair and "--finetune" in problem.repair


@pytest.mark.parametrize(("settings", "message"), [
    ({"ckpt_step": 5}, "output.ckpt_step=5: has no folder to load from"),
    ({"finetune": True}, "output.finetune=True: has no folder"),
    ({"exit_on_missing_checkpoint": True}, "output.exit_on_missing_checkpoint=True: has no folder"),
    ({"load": "a", "ckpt_step": -1}, "output.ckpt_step=-1: is negative"),
    ({"load": "a", "save": "a", "finetune": True}, "output.finetune=True: would save among the checkpoints"),
    ({"load": "a", "save": "b", "finetune": True, "ckpt_step": 0}, None),
])
def test_settings_that_do_not_go_together(settings: dict[str, object], message: str | None) -> None:
    found = [str(problem) for problem in OutputConfig(**settings).problems()]  # type: ignore[arg-type]
    assert found[0].startswith(message) if message else not found
