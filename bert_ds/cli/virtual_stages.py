"""Megatron-LM's way to ask for several stages a pipeline rank: by the layers that each of them has."""

from __future__ import annotations

from bert_ds.cli.fields import default_of
from bert_ds.cli.settings import Settings, show
from bert_ds.errors import Problem

FLAG = "--num-layers-per-virtual-pipeline-stage"
_SCHEDULE = "parallel.pipeline_schedule"


def settle_virtual_stages(settings: Settings, layers_per_stage: int | None) -> None:
    """Sets the pipeline schedule that `layers_per_stage` means for the model and the pipeline of `settings`.

    Two stages a pipeline rank are dualpipev and one is 1f1b; anything else becomes a problem.
    """
    if layers_per_stage is None:
        return
    layers, ranks = (_number(settings, name) for name in ("model.num_layers", "parallel.pipeline_model_parallel_size"))
    if layers < 1 or ranks < 1:
        return  # a problem of its own
    schedule = {1: "1f1b", 2: "dualpipev"}.get(layers // (ranks * layers_per_stage)) if (
        layers_per_stage > 0 and layers % (ranks * layers_per_stage) == 0) else None
    if schedule is None:
        settings.problems.append(_refused(layers_per_stage, layers, ranks))
    elif settings.is_from_flag(_SCHEDULE) and settings.values[_SCHEDULE].value != schedule:
        given = settings.values[_SCHEDULE]
        settings.problems.append(Problem(FLAG, layers_per_stage, f"means {schedule} and contradicts {given.origin} "
                                         f"{show(given.value)}", "give one of the two"))
    else:
        settings.override(_SCHEDULE, schedule, FLAG)


def _refused(layers_per_stage: int, layers: int, ranks: int) -> Problem:
    repair = "leave it out"
    if ranks > 1 and layers % (2 * ranks) == 0:
        repair = f"give {layers // (2 * ranks)}"
    elif 1 < ranks <= layers // 2:
        repair = "give --pipeline-schedule dualpipev, which balances uneven stages"
    return Problem(FLAG, layers_per_stage, f"does not cut {layers} layers into two stages for each of {ranks} pipeline "
                   "ranks: DualPipeV gives each rank two, and no schedule gives it more", repair)


def _number(settings: Settings, name: str) -> int:
    """A setting's value; 0 where it is missing and has no default, which is reported elsewhere."""
    given = settings.values.get(name)
    number = default_of(name) if given is None else given.value
    return number if isinstance(number, int) else 0
