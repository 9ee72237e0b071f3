"""`--use-checkpoint-args`: a run takes its model from the checkpoint that it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bert_ds.cli.fields import settings_of
from bert_ds.cli.settings import Settings, show
from bert_ds.config.output import OutputConfig
from bert_ds.errors import Problem

SWITCH = "output.use_checkpoint_args"


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Settings by dotted name that a checkpoint knows."""

    origin: str
    """The checkpoint."""
    defining: Mapping[str, object]
    """What its weights depend on: these replace the recipe's."""
    usual: Mapping[str, object]
    """What stands where the recipe is silent."""


LookUp = Callable[[OutputConfig], SavedSettings]
"""From the settings that say which checkpoint is loaded to what it holds; raises CheckpointError where none is."""


def take_saved_settings(settings: Settings, look_up: LookUp) -> None:
    """Gives `settings` what the checkpoint knows, if the run asks for it. Flags win over both checkpoint and recipe."""
    asked = settings.values.get(SWITCH)
    if asked is None or not asked.value:
        return
    names = {name: name.split(".")[1] for name in settings_of("output")}
    output = OutputConfig(**{names[name]: given.value for name, given in settings.values.items() if name in names})
    if output.load is None:
        settings.problems.append(Problem(SWITCH, True, "has no folder to load from", "set output.load by --load"))
        return
    saved = look_up(output)
    for name, value in saved.defining.items():
        before = settings.values.get(name)
        if settings.is_from_flag(name):
            continue
        if before is not None and before.value != value:
            settings.remarks.append(f"{name}={show(value)} of {saved.origin} overrides {show(before.value)} of "
                                    f"{before.origin}")
        settings.give(name, value, origin=saved.origin, written=name)
    for name, value in saved.usual.items():
        if name not in settings.values:
            settings.give(name, value, origin=saved.origin, written=name)
