"""Recipe, DeepSpeed JSON and flags merged into one RunConfig, all problems reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_ds.cli.batch import settle_batch
from bert_ds.cli.deepspeed_reader import DeepSpeedJson, read_deepspeed_json
from bert_ds.cli.fields import REQUIRED, SECTIONS, default_of, settings_of
from bert_ds.cli.flags import FLAGS, Flag
from bert_ds.cli.nearest import suggestion
from bert_ds.cli.parse_flags import CommandLine, CommandOptions, parse_flags
from bert_ds.cli.recipe_yaml import read_recipe
from bert_ds.cli.saved_settings import LookUp, take_saved_settings
from bert_ds.cli.settings import DEFAULT, Given, Settings, show
from bert_ds.cli.shipped_files import (
    DS_CONFIGS,
    config_beside,
    find_file,
    find_recipe,
    recipe_beside,
    shipped_names,
)
from bert_ds.cli.virtual_stages import settle_virtual_stages
from bert_ds.config.run import RunConfig
from bert_ds.errors import ConfigError, Problem, raise_if_any


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run without problems, and where each of its values came from."""

    config: RunConfig
    world_size: int
    """Ranks that the run was checked for."""
    options: CommandOptions
    origins: Mapping[str, str]
    """File, flag or `default` by dotted name: `model.num_layers`, `engine.lr`, `loss_scaling.hysteresis`."""
    remarks: tuple[str, ...]
    """Lines for the log: every override and every flag without effect."""
    recipe: Path | None
    deepspeed_config: Path | None


def resolve_run(argv: Sequence[str], *, world_size: int, saved_settings: LookUp | None = None) -> ResolvedRun:
    """The run that the command line `argv` (without the program's name) asks for on `world_size` ranks.

    `--dry-run --world-size N` replaces `world_size`. Opens the recipe and the JSON and nothing else; imports neither
    torch nor DeepSpeed. `saved_settings` opens the checkpoint of a run that takes its model from there. Raises
    ConfigError with everything that is wrong.
    """
    line = parse_flags(argv)
    settings = Settings(problems=list(line.problems), remarks=list(line.remarks))
    world_size = line.options.world_size or world_size
    recipe, config = _find_files(line, settings)
    if recipe is not None:
        read_recipe(recipe, settings)
    extras = DeepSpeedJson() if config is None else read_deepspeed_json(config, settings)
    _override(line, settings)
    if saved_settings is not None:
        take_saved_settings(settings, saved_settings)
    settle_virtual_stages(settings, line.options.layers_per_virtual_stage)
    if recipe is None and config is None and not line.values and not line.problems:
        raise ConfigError.of("command line", "empty", "names no run",
                             f"give --deepspeed_config {DS_CONFIGS}/NAME.json or --recipe NAME, with NAME one of "
                             f"{', '.join(shipped_names())}")
    settle_batch(settings, extras.accumulation, world_size)
    source = recipe or config
    run = _build(source.stem if source else "bert", settings, extras.handed_on)
    raise_if_any(ConfigError, [*settings.problems, *run.problems(world_size)])
    return ResolvedRun(config=run, world_size=world_size, options=line.options, origins=_origins(settings),
                       remarks=tuple(settings.remarks), recipe=recipe, deepspeed_config=config)


def _find_files(line: CommandLine, settings: Settings) -> tuple[Path | None, Path | None]:
    """Recipe and JSON; one that is not named is the one with the other's name. Raises when a named one is missing."""
    recipe, config = line.options.recipe, line.options.deepspeed_config
    recipe_file = None if recipe is None else find_recipe(recipe)
    config_file = None if config is None else find_file(config)
    if recipe is not None and recipe_file is None:
        settings.problems.append(Problem("--recipe", recipe, "is neither a recipe's name nor a file",
                                         suggestion(Path(recipe).stem, shipped_names())))
    if config is not None and config_file is None:
        shipped = [f"{DS_CONFIGS}/{name}.json" for name in shipped_names()]
        settings.problems.append(Problem("--deepspeed_config", config, "does not exist", suggestion(config, shipped)))
    if (recipe is None) != (recipe_file is None) or (config is None) != (config_file is None):
        raise ConfigError(*settings.problems)
    if recipe_file is None and config_file is not None:
        recipe_file = recipe_beside(config_file)
    elif config_file is None and recipe_file is not None:
        config_file = config_beside(recipe_file)
    return recipe_file, config_file


def _override(line: CommandLine, settings: Settings) -> None:
    for setting, given in line.values.items():
        for flag, value in given:
            settings.override(setting, _whole(flag, value, settings), flag.name)
            _displace(flag, settings)
            for implied, its_value in flag.implies:
                if implied not in line.values:
                    settings.override(implied, its_value, flag.name)
    _load_follows_save(line, settings)


def _whole(flag: Flag, value: Any, settings: Settings) -> Any:
    """The setting's whole value when the flag gives one item of it."""
    if flag.item is None:
        return value
    before = settings.values.get(flag.setting)
    items = list(default_of(flag.setting) if before is None else before.value)
    items[flag.item] = value
    return tuple(items)


def _displace(flag: Flag, settings: Settings) -> None:
    if flag.displaces is not None and not settings.is_from_flag(flag.displaces):
        displaced = settings.values.pop(flag.displaces, None)
        if displaced is not None:
            settings.remarks.append(f"{flag.name} replaces {displaced.written}={show(displaced.value)} "
                                    f"of {displaced.origin}")


def _load_follows_save(line: CommandLine, settings: Settings) -> None:
    """A recipe that resumes from where it saves goes on doing so when --save moves its checkpoints."""
    if "output.save" in line.values and "output.load" not in line.values and "output.load" in settings.values:
        settings.override("output.load", settings.values["output.save"].value, "--save")


def _build(name: str, settings: Settings, handed_on: Mapping[str, Any]) -> RunConfig:
    """The run; settings that are missing although they have no default end it here."""
    required = [setting for section in SECTIONS for setting in settings_of(section)
                if default_of(setting) is REQUIRED and setting not in settings.values]
    if required:
        missing = [_missing(setting) for setting in required if setting not in settings.rejected]
        raise ConfigError(*settings.problems, *missing)
    sections = {section: _section(section, settings) for section in SECTIONS}
    loss_scaling = SECTIONS["loss_scaling"](**sections.pop("loss_scaling"))
    engine = SECTIONS["engine"](**sections.pop("engine"), loss_scaling=loss_scaling, passed_through=handed_on)
    return RunConfig(name=name, engine=engine,
                     **{section: SECTIONS[section](**values) for section, values in sections.items()})


def _section(section: str, settings: Settings) -> dict[str, Any]:
    return {setting.split(".")[1]: settings.values[setting].value for setting in settings_of(section)
            if setting in settings.values}


def _missing(setting: str) -> Problem:
    file = "DeepSpeed JSON" if setting.startswith("engine.") else "recipe"
    flag = next(flag.name for flag in FLAGS if flag.setting == setting)
    return Problem(setting, "none", "is not set and has no default", f"set it in the {file} or by {flag}")


def _origins(settings: Settings) -> dict[str, str]:
    unset = Given(value=None, origin=DEFAULT, written="")
    return {setting: settings.values.get(setting, unset).origin for section in SECTIONS
            for setting in settings_of(section)}
