"""From what a file or a command line holds to the type that a setting wants."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


class WrongTypeError(Exception):
    """The value is of another type; the message says what was expected."""


def coerce(value: object, wanted: Any) -> Any:
    """`value` as `wanted`: int, float, bool, str, a Literal of them, tuple[str, ...], tuple[float, float] or one of
    these | None, which a flag writes as `none`. Numbers may be written as text (YAML reads 1e-4 as one). Raises
    WrongTypeError otherwise."""
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        inner = next(kind for kind in choices if kind is not NoneType)
        return None if value is None or str(value).lower() == "none" else coerce(value, inner)
    if origin is Literal:
        return _choice(value, choices)
    if origin is tuple:
        return _texts(value) if choices == (str, ...) else _numbers(value, len(choices))
    return _SCALARS[wanted](value)


def expectation(wanted: Any) -> str:
    """What a value of type `wanted` looks like, for help and messages."""
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return expectation(next(kind for kind in choices if kind is not NoneType))
    if origin is Literal:
        return f"one of {', '.join(map(str, choices))}"
    if origin is tuple:
        return "one or several texts" if choices == (str, ...) else f"a list of {len(choices)} numbers"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[wanted]


def _choice(value: object, choices: tuple[Any, ...]) -> Any:
    matching = [choice for choice in choices if str(choice) == str(value) and not isinstance(value, bool)]
    if not matching:
        raise WrongTypeError(expectation(Literal[choices]))
    return matching[0]


def _texts(value: object) -> tuple[str, ...]:
    parts = value.split() if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | int | float) for part in parts):
        raise WrongTypeError("one or several texts")
    return tuple(map(str, parts))


def _numbers(value: object, length: int) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise WrongTypeError(f"a list of {length} numbers")
    return tuple(map(_float, value))


def _float(value: object) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    except ValueError:
        pass
    raise WrongTypeError("a number")


def _int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = _float(value)
    except WrongTypeError:
        number = math.nan
    if number != round(number, 0):
        raise WrongTypeError("a whole number")
    return int(number)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise WrongTypeError("true or false")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise WrongTypeError("text")
    return value


_SCALARS: dict[Any, Callable[[object], Any]] = {int: _int, float: _float, bool: _bool, str: _str}
