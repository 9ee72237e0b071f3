"""DeepSpeed's own converter makes of DeepSpeed's own files what our checkpoint of the same state holds."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_runs import Case, EngineRun, run_config, vocabulary, write_vocabulary

from bert_ds.checkpoint.format import KINDS
from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.errors import ConfigError
from bert_ds.training.deepspeed_layout import check_folder

CASES = [Case(tp=2, pp=2, steps=2), Case(tp=2, pp=2, precision="bf16", steps=2)]
_STATES = dict(zip(KINDS, ("fp32", "exp_avg", "exp_avg_sq"), strict=True))


def save_both(cases: list[Case], root: str, vocab_file: str) -> list[dict[str, str]]:
    """Saves our checkpoint and DeepSpeed's after a few steps; returns DeepSpeed's names of our parameters."""
    from bert_ds.training.deepspeed_layout import save_deepspeed_layout  # noqa: PLC0415

    found = []
    for index, case in enumerate(cases):
        run = EngineRun(case, Path(root) / f"ours{index}")
        run.steps(case.steps)
        run.save(Path(vocab_file))
        output = replace(run.run.output, save_deepspeed=str(Path(root) / f"deepspeed{index}"))
        save_deepspeed_layout(replace(run.run, output=output), run.ctx, run.coordinator, run.engine,
                              vocabulary())
        names = {id(parameter): name for name, parameter in run.pipeline.named_parameters()}
        found.append({local.name: names[id(local.parameter)] for local in run.pipeline.local_parameters()
                      if not local.is_copy})
        run.close()
    dist.barrier()
    return found


@pytest.mark.proves("DeepSpeed's universal converter reads our masters and moments from its own layout", "EXACT")
@pytest.mark.long
def test_deepspeeds_converter_reads_what_is_written(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    names_of_ranks = run_ranks(save_both, 4, CASES, str(tmp_path), str(vocab_file))
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal  # noqa: PLC0415

    for index, case in enumerate(CASES):
        folder, out = tmp_path / f"deepspeed{index}" / f"global_step{case.steps}", tmp_path / f"universal{index}"
        assert (folder.parent / "latest").read_text() == folder.name
        assert (folder / "layer_01-model_01-model_states.pt").is_file()
        state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
        assert (state["iteration"], state["consumed_samples"], state["bert_ds_config"]["name"]) == (2, 32, "test")
        ds_to_universal(Namespace(
            input_folder=str(folder), output_folder=str(out), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=False))
        ours = Checkpoint.open(locate(tmp_path / f"ours{index}"))
        names = {name: theirs for rank in names_of_ranks for name, theirs in rank[index].items()}
        assert names.keys() == ours.manifest.parameters.keys()
        for name, theirs in names.items():
            for kind, state_name in _STATES.items():
                merged = torch.load(out / "zero" / theirs / f"{state_name}.pt", weights_only=False)["param"]
                assert torch.equal(merged.float(), ours.read_full(kind, name)), (case.precision, kind, name)


@pytest.mark.parametrize(("case", "reason"), [
    (Case(zero=0), "needs ZeRO's files"), (Case(pp=2, schedule="dualpipev"), "does not know the stages of DualPipeV"),
])
def test_what_deepspeeds_converter_does_not_read_is_refused(case: Case, reason: str) -> None:
    run = run_config(case)
    run = replace(run, output=replace(run.output, save_deepspeed="deepspeed"))
    found = [problem for problem in run.problems(case.tp * case.pp) if problem.setting == "output.save_deepspeed"]
    assert [reason in problem.reason for problem in found] == [True]


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "none yet")
    check_folder(tmp_path)
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        check_folder(tmp_path)
