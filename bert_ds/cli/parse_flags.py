"""Reads the command line of training; nothing here knows of files."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from bert_ds.cli.argument_files import ARGUMENT_FILES, with_argument_files
from bert_ds.cli.coerce import WrongTypeError, coerce, expectation
from bert_ds.cli.fields import REQUIRED, default_of, documentation_of, type_of
from bert_ds.cli.flags import (
    DATA_FLAGS,
    FLAGS,
    GROUPS,
    PARALLEL_FLAGS,
    TAKES_VALUE,
    Flag,
)
from bert_ds.cli.megatron_flags import ONLY, REFUSED, VALUE_WITHOUT_EFFECT, WITHOUT_EFFECT
from bert_ds.cli.nearest import nearest
from bert_ds.cli.settings import show, wrong_type
from bert_ds.cli.virtual_stages import FLAG as VIRTUAL_STAGES
from bert_ds.errors import ConfigError, Problem

DESCRIPTION = """\
Pretrains BERT. A run is a recipe (YAML: model, layout, data, schedule, output) and a DeepSpeed configuration (JSON:
batch sizes, precision, optimizer); one names the other when they share their name. Flags override both, the later of
two wins, and every override is logged.

  deepspeed --num_gpus 8 bert_ds/pretrain.py --deepspeed_config ds_configs/340m.json
  python bert_ds/pretrain.py --recipe 340m --dry-run --world-size 128
"""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What the command line says beyond the run's own settings."""

    deepspeed_config: str | None = None
    recipe: str | None = None
    dry_run: bool = False
    world_size: int | None = None
    """Ranks to plan for in a dry run."""
    local_rank: int | None = None
    """Written by the launcher; None leaves it to the environment."""
    layers_per_virtual_stage: int | None = None
    """Megatron's way to choose a pipeline schedule, see cli/virtual_stages.py."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The parsed command line."""

    options: CommandOptions
    values: dict[str, list[tuple[Flag, Any]]] = field(default_factory=dict)
    """Values of each setting in the order of the table; more than one where several flags name it."""
    problems: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()


def parse_flags(argv: Sequence[str]) -> CommandLine:
    """All flags of `argv`; unknown ones and wrong values come back as problems. `--help` prints and exits with 0."""
    parsed, rest = _parser().parse_known_args(with_argument_files([_dashed(word) for word in argv]))
    problems = list(_unknown(rest))
    values: dict[str, list[tuple[Flag, Any]]] = defaultdict(list)
    for flag in FLAGS:
        written = getattr(parsed, _key(flag))
        if written is None:
            continue
        try:
            value = _value(flag, written)
        except WrongTypeError as wrong:
            # Where a flag has a unit or an item of its own, the setting's default is not what could stand there.
            setting = flag.setting if flag.convert is None and flag.item is None else None
            problems.append(wrong_type(flag.name, show(written), wrong, setting))
        else:
            values[flag.setting].append((flag, value))
    problems += _refused(parsed) + _contradictions(values)
    idle = WITHOUT_EFFECT | VALUE_WITHOUT_EFFECT | {
        name: flag.why for name, flag in ONLY.items() if getattr(parsed, name) in flag.values}
    remarks = tuple(f"{name} has no effect: {why}" for name, why in idle.items() if getattr(parsed, name))
    options, option_problems = _options(parsed)
    return CommandLine(options=options, values=values, problems=(*problems, *option_problems), remarks=remarks)


class _Parser(argparse.ArgumentParser):
    """Reports malformed flags as this package reports everything."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError.of("command line", message, "cannot be read", "see --help")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=118)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain.py", usage="pretrain.py [flags]", description=DESCRIPTION, allow_abbrev=False,
                     add_help=False, formatter_class=_formatter)
    command = parser.add_argument_group("command")
    command.add_argument("--help", "-h", action="help", help="Print this and exit.")
    command.add_argument("--deepspeed-config", metavar="FILE", help="DeepSpeed JSON; alone it names a whole run.")
    command.add_argument("--recipe", metavar="NAME|FILE", help="Recipe; default: the one named as the JSON.")
    command.add_argument("--dry-run", action="store_true",
                         help="Print the resolved run, its layout and predicted memory, and stop; touches no device.")
    command.add_argument("--world-size", metavar="N", help="Ranks to plan for in a dry run.")
    command.add_argument("--local-rank", metavar="N", help="Written by launchers.")
    command.add_argument("--deepspeed", action="store_true", help="Accepted; training always runs on DeepSpeed.")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
        if flags is PARALLEL_FLAGS:
            group.add_argument(VIRTUAL_STAGES, dest="layers_per_virtual_stage", metavar="N",
                               help="Megatron's way to choose --pipeline-schedule: dualpipev where N layers a stage "
                                    "make two stages of each pipeline rank.")
        if flags is DATA_FLAGS:
            for name, text in ARGUMENT_FILES.items():
                group.add_argument(name, metavar="FILE", help=text)
    for name in WITHOUT_EFFECT:
        parser.add_argument(name, dest=name, action="store_true", help=argparse.SUPPRESS)
    for name in (*VALUE_WITHOUT_EFFECT, *ONLY):
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(name, dest=name, nargs="*", help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    if flag.constant is not TAKES_VALUE:
        group.add_argument(flag.name, dest=_key(flag), action="store_const", const=flag.constant, help=_help(flag))
        return
    several = type_of(flag.setting) == tuple[str, ...]
    group.add_argument(flag.name, dest=_key(flag), metavar=_metavar(flag), nargs="+" if several else None,
                       help=_help(flag))


def _key(flag: Flag) -> str:
    return flag.name.removeprefix("--")


def _metavar(flag: Flag) -> str:
    if flag.item is not None or flag.convert is not None:
        return "X"
    return {"a whole number": "N", "a number": "X", "text": "TEXT"}.get(expectation(type_of(flag.setting)), "VALUE")


def _help(flag: Flag) -> str:
    """Documentation, choices and default of the flag's setting, with argparse's percent signs escaped."""
    parts = [flag.help or documentation_of(flag.setting)]
    if flag.constant is TAKES_VALUE and flag.item is None and flag.convert is None:
        expected = expectation(type_of(flag.setting))
        parts += [f"O{expected[1:]}."] if expected.startswith("one of") else []
        default = default_of(flag.setting)
        parts += [f"Default: {show(default)}."] if default not in (REQUIRED, None, ()) else []
    return " ".join(part for part in parts if part).replace("%", "%%")


def _value(flag: Flag, written: Any) -> Any:
    if flag.constant is not TAKES_VALUE:
        return written
    if flag.convert is not None:
        return flag.convert(written)
    return coerce(written, float if flag.item is not None else type_of(flag.setting))


def _dashed(word: str) -> str:
    """Flags may be written with underscores, as DeepSpeed does, or with dashes."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(rest: Sequence[str]) -> list[Problem]:
    known = [flag.name for flag in FLAGS] + ["--deepspeed_config", "--recipe", "--dry-run", "--world-size"]
    problems: list[Problem] = []
    for word in rest:
        if not word.startswith("-"):
            if not problems:
                problems.append(Problem("command line", word, "is not a flag", "see --help"))
            continue
        name = word.partition("=")[0]
        match = nearest(name, known)
        problems.append(Problem("flag", name, "is not known", f"use {match}" if match else "see --help"))
    return problems


def _refused(parsed: argparse.Namespace) -> list[Problem]:
    refused = [Problem(name, show(tuple(getattr(parsed, name)) or True), why, instead)
               for name, (why, instead) in REFUSED.items() if getattr(parsed, name) is not None]
    return refused + [Problem(name, getattr(parsed, name), flag.why, flag.instead) for name, flag in ONLY.items()
                      if getattr(parsed, name) not in (None, *flag.values)]


def _contradictions(values: dict[str, list[tuple[Flag, Any]]]) -> list[Problem]:
    """Different flags that give one setting different values; the same flag twice is no contradiction."""
    problems = []
    for given in values.values():
        (first, value), *others = given
        for flag, other in others:
            if flag.item == first.item and other != value:
                problems.append(Problem(flag.name, show(other), f"contradicts {first.name}", "give one of the two"))
        if first.displaces in values:
            problems.append(Problem(first.name, show(value), f"contradicts {values[first.displaces][0][0].name}",
                                    "give one of the two"))
    return problems


def _options(parsed: argparse.Namespace) -> tuple[CommandOptions, list[Problem]]:
    problems = []
    flags = {"world_size": "--world-size", "local_rank": "--local-rank", "layers_per_virtual_stage": VIRTUAL_STAGES}
    numbers: dict[str, int | None] = dict.fromkeys(flags)
    for name, flag in flags.items():
        written = getattr(parsed, name)
        try:
            numbers[name] = coerce(written, int | None)
        except WrongTypeError as wrong:
            problems.append(wrong_type(flag, written, wrong))
    if numbers["world_size"] is not None:
        if not parsed.dry_run:
            problems.append(Problem("--world-size", numbers["world_size"], "is for dry runs; the launcher decides here",
                                    "add --dry-run, or start that many ranks"))
        elif numbers["world_size"] < 1:
            problems.append(Problem("--world-size", numbers["world_size"], "must be at least 1", "count the ranks"))
    return CommandOptions(deepspeed_config=parsed.deepspeed_config, recipe=parsed.recipe, dry_run=parsed.dry_run,
                          **numbers), problems
