"""Modules that are known to be exact, which are taken as a whole; and what they are made with, which is not.

A layer of PyG or DGL mixes rows in ways that the engine knows: it normalises by degrees, adds self-loops, or numbers
the edges of several types one after the other. Its code is tested against the whole graph, so nobody follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.script_names import is_compiled_function
from shardpass.core.following.scripts import Script
from shardpass.core.ranks import torch_private

_LAYERS = ("torch_geometric.", "dgl.", "shardpass.")
_LIBRARIES = ("torch.", *_LAYERS)
_OWN_PARTS = (
    "torch.nn.modules.linear",
    "torch.nn.modules.dropout",
    "torch.nn.modules.rnn",
    "torch_geometric.nn.dense.linear",
    "torch_geometric.nn.aggr.",
    "torch_geometric.nn.attention.",
)
"""What layers are made of by their authors. A linear map takes rows one by one; others are tested in their layers."""


def _is_given(value: Any) -> bool:
    """Whether a value is a function that somebody gave to a layer, or another callable that is no module."""
    if not callable(value) or isinstance(value, (nn.Module, type)):
        return False
    value = value.func if isinstance(value, partial) else value
    value = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(value, Script) or is_compiled_function(value):
        return True
    if isinstance(value, (FunctionType, BuiltinFunctionType)):  # of torch, too: an activation may be a softmax
        return not (value.__module__ or "").startswith(_LAYERS)
    return not type(value).__module__.startswith((*_LIBRARIES, "torch", "builtins", "functools"))


def _is_own(part: nn.Module) -> bool:
    return any(kind.__module__.startswith(_OWN_PARTS) for kind in type(part).__mro__)


def _given_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules in a layer that somebody may have given to it."""
    if _is_own(layer):
        return
    for part in layer.children():
        yield from [] if _is_own(part) else [part, *_given_parts(part)]


@contextmanager
def known_modules(model: nn.Module, is_known: Callable[[nn.Module], bool], follower: FollowRows) -> Iterator[None]:
    """A block in which `follower` leaves out what modules of `model` compute of which `is_known` says so.

    It looks at what they are given and what they return. What a layer is made with, such as an activation or a gate, is
    followed again, whether its code is the user's or torch's.
    """
    running: list[_Call] = []
    within = {part for module in model.modules() if is_known(module) for part in _given_parts(module)}
    with ExitStack() as hooks:
        for module in model.modules():
            known = is_known(module)
            for name, value in [*vars(module).items()] if known else ():
                if _is_given(value):  # such as an activation
                    vars(module)[name] = follower.following(value)
                    hooks.callback(vars(module).__setitem__, name, value)
            if known or module in within or not type(module).__module__.startswith(_LIBRARIES):
                block = _Block(follower, known, running)
                # inside of the user's own hooks, which are followed
                hooks.callback(module.register_forward_pre_hook(block.begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(block.end, prepend=True, always_call=True).remove)
        try:
            yield
        finally:
            while running:  # torch calls no hooks where SystemExit or KeyboardInterrupt ends a module
                running.pop().block.__exit__(None, None, None)


class _Block:
    """The hooks of one module; it may be called within itself."""

    def __init__(self, follower: FollowRows, is_known: bool, running: list[_Call]) -> None:
        self.follower, self.is_known, self._running = follower, is_known, running

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.is_known and not self.follower.is_paused:
            with self.follower.paused():
                self.follower.marks.check_arguments(args, kwargs)
        self.follower.made.clear()
        within, block = self.follower.in_known, self.follower.module(self.is_known or self.follower.is_left_to_another)
        block.__enter__()
        self._running.append(_Call(self, within, block, (args, kwargs)))
        if not self.is_known:
            return None
        follow = self.follower.following
        return torch_private.tree_map(lambda value: follow(value) if _is_given(value) else value, (args, kwargs))

    def end(self, module: nn.Module, args: Any, out: Any) -> None:
        if not any(call.of is self for call in self._running):
            return  # `begin` refused the arguments
        while (call := self._running.pop()).of is not self:
            call.block.__exit__(None, None, None)  # a module that the engine stopped, once a message had told all
        call.block.__exit__(None, None, None)
        if self.is_known and not any(call.given):
            self.follower.marks.note_made_of_state(out)
        elif self.is_known and not self.follower.is_paused:
            self.follower.recognise(out, call.given, is_of_module=True)
        if not self.is_known and call.within:
            self.follower.marks.check_result(out)  # nobody looks at what the known module makes of it


class _Call(NamedTuple):
    """A call of a module that has not ended.

    Args:
        of: the hooks of the module.
        within: a known module makes the call.
        block: the block that the call ends.
        given: its arguments.
    """

    of: _Block
    within: bool
    block: AbstractContextManager[None]
    given: tuple[Any, Any]
