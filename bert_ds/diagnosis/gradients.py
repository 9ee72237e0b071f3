"""DeepSpeed's gradients under accumulation in a pipeline, against plain torch.

Up to 0.18.2 they are added up over the micro-batches instead of averaged; from 0.18.3 to 0.19.2 the stages before the
last divide once more by their number. Adam hides the first, and nothing reports either.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bert_ds.compat import import_deepspeed, installed_version, quiet
from bert_ds.diagnosis.finding import Finding, Settings

STAGES = 2
ACCUMULATION = 4
TOLERANCE = 1e-4
"""Of a gradient's norm; fp32 on a few numbers is far within it."""
_WIDTH = 8
_CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.0,
           "steps_per_print": 10**9, "zero_optimization": {"stage": 0}}
_LIMIT = timedelta(seconds=30)


class SeededLinear(nn.Linear):
    """A layer whose weights follow from its place in the model."""

    def __init__(self, place: int) -> None:
        super().__init__(_WIDTH, _WIDTH)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / _WIDTH**0.5)


def check_gradients(_settings: Settings) -> Sequence[Finding]:
    """One row: a pipeline of two gloo ranks takes a step of SGD over four micro-batches."""
    return [judge(expected_gradients(), pipeline_gradients(), str(installed_version("deepspeed")))]


def judge(expected: Sequence[Tensor], found: Sequence[Tensor], version: str) -> Finding:
    """The row for gradients of all layers, from the first stage on."""
    errors = [float((ours - right).norm() / right.norm()) for ours, right in zip(found, expected, strict=True)]
    ratios = [float((ours * right).sum() / right.square().sum())
              for ours, right in zip(found, expected, strict=True)]
    figures = {"relative_errors": errors, "ratios": ratios}
    if all(error <= TOLERANCE for error in errors):  # NaN is not
        return Finding(check="gradients", verdict="fine", figures=figures, found=f"DeepSpeed {version}: a pipeline of "
                       f"{STAGES} with {ACCUMULATION} micro-batches has those of plain torch (to {max(errors):.0e})")
    stages = [ratios[stage * len(ratios) // STAGES] for stage in range(STAGES)]
    text = ", ".join(f"{ratio:.3g} times the right ones on stage {stage}" for stage, ratio in enumerate(stages))
    return Finding(check="gradients", verdict="problem", figures=figures,
                   found=f"DeepSpeed {version} computes wrong gradients under accumulation: {text}",
                   repair='pip install "deepspeed>=0.19.8,<0.20"')


def expected_gradients() -> list[Tensor]:
    """Weight gradients of the mean loss of all micro-batches, in plain torch."""
    layers = [SeededLinear(place) for place in range(STAGES)]
    model = nn.Sequential(*layers)
    losses = [F.mse_loss(model(inputs), labels) for inputs, labels in _micro_batches()]
    return list(torch.autograd.grad(torch.stack(losses).mean(), [layer.weight for layer in layers]))


def pipeline_gradients(rank_gradient: Callable[[int, str], Tensor] | None = None) -> list[Tensor]:
    """Weight gradients that DeepSpeed's pipeline engine applies, of all stages in order.

    Args:
        rank_gradient: what computes a rank's part; DeepSpeed, unless another is given.

    Raises:
        RuntimeError: a rank failed.
    """
    import_deepspeed(any_version=True)  # once, before the ranks part from this process
    context, folder = get_context("fork"), tempfile.mkdtemp(prefix="bert_ds_doctor_")
    results = context.Queue()
    ranks = [context.Process(target=_report, args=(rank_gradient or deepspeed_gradient, rank, folder, results))
             for rank in range(STAGES)]
    try:
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=_LIMIT.total_seconds()) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(folder)
    if errors := [value for _, value in sorted(found.items()) if isinstance(value, str)]:
        raise RuntimeError(errors[0])
    return [torch.tensor(found[rank]) for rank in range(STAGES)]


def _report(rank_gradient: Callable[[int, str], Tensor], rank: int, folder: str, results: Any) -> None:
    try:
        results.put((rank, rank_gradient(rank, folder).tolist()))
    except Exception as error:  # noqa: BLE001 - told by the parent
        results.put((rank, f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)  # the group's threads would wait for peers that are gone


def deepspeed_gradient(rank: int, folder: str) -> Tensor:
    """One rank's part: the change of its layer's weight under one step of SGD with a learning rate of 1."""
    deepspeed = import_deepspeed(any_version=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(STAGES))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES, timeout=_LIMIT)
    with quiet():
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        module = deepspeed.pipe.PipelineModule(
            [deepspeed.pipe.LayerSpec(SeededLinear, place) for place in range(STAGES)], num_stages=STAGES,
            loss_fn=F.mse_loss, partition_method="uniform", activation_checkpoint_interval=0)
        [layer] = [part for part in module.modules() if isinstance(part, SeededLinear)]
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), config=_CONFIG)
        before = layer.weight.detach().clone()
        engine.train_batch(_micro_batches())
    return before - layer.weight.detach()


def _micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(99)
    for _ in range(ACCUMULATION):
        yield torch.randn(2, _WIDTH, generator=generator), torch.randn(2, _WIDTH, generator=generator)
