"""Whether a value that was read from JSON has the form that it should have."""

from __future__ import annotations

from typing import Any

COUNT = range(2**63)
"""The schema of a number of things."""


def mismatch(value: Any, schema: Any, where: str = "") -> str | None:
    """Words about the first place where `value` is not as `schema` says, or `None`.

    Args:
        value: made of dicts, lists, strings, numbers, booleans and `None`.
        schema: a type, which a value has (a boolean is no `int`, strings are valid Unicode, and any value is an
            `object`); `None`; a `range`, in which an integer is; a frozenset, which holds a string; ``[s]`` for a list
            of such; ``{str: s}`` for a dict of such; another dict for one with these keys; or a tuple of alternatives.
        where: the place of `value`, as in ``files[0].name``.
    """
    if isinstance(schema, tuple):
        found = [mismatch(value, option, where) for option in schema]
        return None if None in found else found[0]
    if isinstance(schema, list) and isinstance(value, list):
        places = [(item, schema[0], f"{where}[{index}]") for index, item in enumerate(value)]
    elif isinstance(schema, dict) and isinstance(value, dict):
        schema = dict.fromkeys(value, schema[str]) if str in schema else schema
        missing = next((key for key in schema if key not in value), None)
        if missing is not None:
            return f"{where or 'it'} has no {missing!r}"
        places = [(key, str, f"a name in {where}") for key in schema]
        places += [(value[key], inner, f"{where}.{key}".lstrip(".")) for key, inner in schema.items()]
    else:
        return None if _fits(value, schema) else f"{where or 'it'} is {_short(value)}"
    return next((words for place in places if (words := mismatch(*place))), None)


def _fits(value: Any, schema: Any) -> bool:
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if isinstance(schema, frozenset):
        return isinstance(value, str) and value in schema
    if schema is str:
        return isinstance(value, str) and value.encode(errors="ignore").decode() == value
    return schema is object or value is schema or type(value) is schema


def _short(value: Any) -> str:
    if isinstance(value, list | dict):  # which may be nested deeply
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:60]}..."
