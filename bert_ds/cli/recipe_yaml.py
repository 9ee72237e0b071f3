"""Reads a recipe: YAML with the sections model, parallel, data, schedule and output."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from bert_ds.cli.fields import RECIPE_SECTIONS, settings_of
from bert_ds.cli.nearest import suggestion
from bert_ds.cli.settings import Settings
from bert_ds.cli.shipped_files import display
from bert_ds.errors import ConfigError, Problem


def read_recipe(path: Path, settings: Settings) -> None:
    """Gives `settings` every value of the recipe; unknown keys and wrong types become problems.

    Raises ConfigError when the file is not YAML.
    """
    origin = display(path)
    sections = _load(path, origin)
    for section, values in sections.items():
        if section not in RECIPE_SECTIONS:
            settings.problems.append(Problem(f"{origin}: section", section, "is not known",
                                             suggestion(str(section), RECIPE_SECTIONS)))
        elif not isinstance(values, dict):
            settings.problems.append(Problem(f"{origin}: {section}", values, "is not a section with settings",
                                             "write one `key: value` a line below it, indented"))
        else:
            _read_section(section, values, origin, settings)


def _read_section(section: str, values: dict[Any, Any], origin: str, settings: Settings) -> None:
    known = {setting.split(".")[1] for setting in settings_of(section)}
    for key, value in values.items():
        if key in known:
            settings.give(f"{section}.{key}", value, origin=origin, written=f"{section}.{key}")
        else:
            settings.problems.append(Problem(f"{origin}: {section}.{key}", value, "is not a known setting",
                                             suggestion(str(key), known)))


def _load(path: Path, origin: str) -> dict[Any, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError.of("recipe", origin, " ".join(str(error).split()), "repair the file") from error
    if not isinstance(loaded, dict):
        raise ConfigError.of("recipe", origin, "holds no sections", f"write {', '.join(RECIPE_SECTIONS)}")
    return loaded


class _UniqueKeys(yaml.SafeLoader):
    """YAML without the silent loss of a key that is written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is written twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
