"""`takes`: a command whose options are the fields of its configuration, so that each is named and explained once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

Backend = Literal["auto", "threads", "processes", "torch_distributed", "mpi", "local"]
StoreFolder = Annotated[str, typer.Argument(help="A directory that `shardpass partition` wrote.", metavar="STORE")]
BackendName = Annotated[Backend, typer.Option(help="auto: the launcher's if one started this process, else threads.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks to start here, or to expect from the launcher.")]
Threads = Annotated[int, typer.Option(min=1, help="Computing threads per rank.")]


def takes(kind: type[Any], but: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command take the annotated fields of the dataclass `kind`, beside its own options.

    It is called with one `kind` in place of them. The fields `but` keep their defaults.
    """
    hints = get_type_hints(kind, include_extras=True)
    taken = [field for field in fields(kind) if get_origin(hints[field.name]) is Annotated and field.name not in but]

    def parameter(name: str, default: Any) -> inspect.Parameter:
        default = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])

    def decorated(work: Callable[..., None]) -> Callable[..., None]:
        @wraps(work)
        def command(**given: Any) -> None:
            work(kind(**{field.name: given.pop(field.name) for field in taken}), **given)

        _, *own = inspect.signature(work, eval_str=True).parameters.values()
        parameters = [parameter(field.name, field.default) for field in taken]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorated
