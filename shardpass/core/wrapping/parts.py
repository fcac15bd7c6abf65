"""The parts of a wrapped model that may be called by themselves, as ``model.encoder(graph)`` is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardpass.core.ranks import torch_private
from shardpass.core.training import LIBRARIES


def parts_of(model: nn.Module, is_known: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules within `model` whose classes its user wrote, but for those that a known layer is made with.

    Args:
        is_known: whether a module is known to be exact.
    """
    found: dict[nn.Module, None] = {}

    def look(module: nn.Module) -> None:
        for child in module.children():
            if is_known(child) or child in found:
                continue
            is_written = type(child).__module__.partition(".")[0] not in LIBRARIES
            if is_written and not isinstance(child, torch.jit.ScriptModule):
                found[child] = None
            look(child)

    look(model)
    return (part for part in found if not getattr(part, "_shardpass_wrapped", False))


def rowwise_parts(model: nn.Module, is_known: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The other modules with parameters that are no part of a known layer: those layers, layers of torch, containers.

    Args:
        is_known: whether a module is known to be exact.
    """
    written, found = set(parts_of(model, is_known)), dict[nn.Module, None]()

    def look(module: nn.Module) -> None:
        for child in module.children():
            is_compiled = isinstance(child, torch.jit.ScriptModule) or hasattr(child, "_orig_mod")
            if child not in found and not is_compiled:
                found[child] = None
                if not is_known(child):
                    look(child)

    look(model)
    return (part for part in found if part not in written and next(part.parameters(), None) is not None)


def runs_as_it_is() -> bool:
    """Whether a part that is called now runs as it is: it is compiled, or backward computes it again."""
    return torch.compiler.is_compiling() or torch_private.is_in_backward()
