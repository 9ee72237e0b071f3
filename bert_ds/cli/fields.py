"""Every setting by its dotted name (`model.num_layers`), with its type, its default and its documentation."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig, LossScaleConfig
from bert_ds.config.guards import GuardConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.schedule import ScheduleConfig

RECIPE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "schedule": ScheduleConfig,
    "output": OutputConfig,
    "guards": GuardConfig,
}
ENGINE_SECTIONS: dict[str, type] = {"engine": EngineConfig, "loss_scaling": LossScaleConfig}
SECTIONS: dict[str, type] = RECIPE_SECTIONS | ENGINE_SECTIONS

REQUIRED = object()
"""Default of a setting that has none."""


def type_of(setting: str) -> Any:
    """Annotation of the field behind `section.field`."""
    section, name = setting.split(".")
    return _hints(SECTIONS[section])[name]


def default_of(setting: str) -> Any:
    """Default value, or REQUIRED."""
    section, name = setting.split(".")
    return _defaults(SECTIONS[section])[name]


def settings_of(section: str) -> tuple[str, ...]:
    """All dotted names of a section, in the order of its class."""
    return tuple(f"{section}.{field.name}" for field in fields(SECTIONS[section]))


def documentation_of(setting: str) -> str:
    """The docstring written below the field, on one line; empty when the name says it all."""
    section, name = setting.split(".")
    return _docstrings(SECTIONS[section]).get(name, "")


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


@cache
def _defaults(section: type) -> dict[str, Any]:
    return {field.name: _default(field) for field in fields(section)}


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else field.default_factory()


@cache
def _docstrings(section: type) -> dict[str, str]:
    """Strings that follow annotated fields in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)):
            found[field.target.id] = " ".join(text.value.value.split())
    return found
