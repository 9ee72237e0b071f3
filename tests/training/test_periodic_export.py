"""Checkpoints are exported while a run trains; an export that fails is one warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from launched import ROOT, SMALL, make_data, outputs
from ranks import run_ranks
from safetensors.torch import load_file
from test_exactness import trained

from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.config.output import OutputConfig
from bert_ds.training.periodic_export import PeriodicExport
from tests.checkpoint.saved_checkpoints import content_of, model_config, random_tensors, save

CONFIG = model_config()


@pytest.mark.long
def test_a_run_leaves_exports_behind(tmp_path: Path) -> None:
    run = ["--deepspeed_config", str(ROOT / "ds_configs" / "tiny.json"), *SMALL, *make_data(tmp_path), "--train-iters",
           "3", "--eval-interval", "none", "--save-interval", "1", "--export-hf-interval", "2", *outputs(tmp_path)]
    assert run_ranks(trained, 1, run, False, join=False) == [0]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("hf_*")) == ["hf_iter_0000002"]
    exported = load_file(folder / "hf_iter_0000002" / "model.safetensors")
    saved = Checkpoint.open(folder / "iter_0000002").read_full("weight", "encoder.final_layernorm.weight")
    assert (exported["bert.encoder.ln.weight"] == saved).all()


@pytest.mark.long
def test_what_goes_wrong_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for step in (100, 200):
        save(tmp_path, CONFIG, random_tensors(CONFIG), step=step)
    exports = PeriodicExport(tmp_path, every=100)
    exports.after_save(50)
    assert not caplog.messages
    exports.after_save(100)
    exports.after_save(200)  # the one before is still being written
    exports.finish()
    exports.after_save(300)  # there is no such checkpoint
    exports.finish()
    exports.finish()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0] == f"checkpoint iter_0000200 is not exported: {tmp_path}/hf_iter_0000100 is still being written"
    assert warnings[1].startswith(f"the export {tmp_path}/hf_iter_0000300 has failed, training goes on: error: ")
    assert f"exported {tmp_path}/hf_iter_0000100" in caplog.messages
    before = content_of(tmp_path / "hf_iter_0000100")
    exports.after_save(100)  # a resumed run that comes by again replaces its export
    exports.finish()
    assert content_of(tmp_path / "hf_iter_0000100") == before


@pytest.mark.parametrize(("settings", "fits"), [
    ({"save_interval": 10, "export_hf_interval": 30}, True), ({"save_interval": 10, "export_hf_interval": 15}, False),
    ({"export_hf_interval": 15}, False), ({"save_interval": 10, "export_hf_interval": 0}, False)])
def test_exports_are_of_checkpoints(settings: dict[str, int], fits: bool) -> None:
    found = [str(problem) for problem in OutputConfig(save="a", **settings).problems()]
    assert (not found) == fits
    assert all(problem.startswith("output.export_hf_interval=") for problem in found)
