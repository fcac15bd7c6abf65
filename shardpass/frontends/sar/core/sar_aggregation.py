"""Message functions with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def message_has_parameters(param_foo: Callable[..., Any]) -> Callable[[Function], Function]:
    """A decorator that returns the message function as it is, since the parameters that it uses are found anyway.

    `param_foo` told SAR the parameters. It is not called.
    """
    if not callable(param_foo):
        raise TypeError(
            f"message_has_parameters takes a function that returns the parameters, got {type(param_foo).__name__}: "
            f"write @sar.message_has_parameters(lambda self: (self.weight,)) above the message function"
        )
    return lambda message: message
