"""Modules that are known to be exact, which are taken as a whole; and modules of the user's within them, which are not.

A layer of PyG or DGL mixes rows in ways that the engine knows: it normalises by degrees, adds self-loops, or numbers
the edges of several types one after the other. Its code is tested against the whole graph, so nobody follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from shardpass.core.following.follow import FollowRows
from shardpass.core.ranks import torch_private

_LIBRARIES = ("torch.", "torch_geometric.", "dgl.", "shardpass.")


def _is_of_user(value: Any) -> bool:
    """Whether a value is a function of the user's, or another callable that is no module."""
    if not callable(value) or isinstance(value, (nn.Module, type)):
        return False
    value = value.func if isinstance(value, partial) else value
    value = value.__func__ if isinstance(value, MethodType) else value
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return not module.startswith((*_LIBRARIES, "builtins", "functools"))


@contextmanager
def known_modules(model: nn.Module, is_known: Callable[[nn.Module], bool], follower: FollowRows) -> Iterator[None]:
    """A block in which `follower` leaves out what modules of `model` compute of which `is_known` says so.

    It looks at what they are given and what they return. A module of a class of the user's is followed again.
    """
    running: list[tuple[_Block, AbstractContextManager[None]]] = []
    with ExitStack() as hooks:
        for module in model.modules():
            known = is_known(module)
            for name, value in [*vars(module).items()] if known else ():
                if _is_of_user(value):  # such as an activation
                    vars(module)[name] = follower.following(value)
                    hooks.callback(vars(module).__setitem__, name, value)
            if known or not type(module).__module__.startswith(_LIBRARIES):
                block = _Block(follower, known, running)
                # inside of the user's own hooks, which are followed
                hooks.callback(module.register_forward_pre_hook(block.begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(block.end, prepend=True, always_call=True).remove)
        try:
            yield
        finally:
            while running:  # torch calls no hooks where SystemExit or KeyboardInterrupt ends a module
                running.pop()[1].__exit__(None, None, None)


class _Block:
    """The hooks of one module; it may be called within itself."""

    def __init__(
        self, follower: FollowRows, is_known: bool, running: list[tuple[_Block, AbstractContextManager[None]]]
    ) -> None:
        self.follower, self.is_known, self._running = follower, is_known, running
        self._is_given_nothing = False

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.is_known and not self.follower.is_paused:
            with self.follower.paused():
                self.follower.marks.check_arguments((args, kwargs))
        self._is_given_nothing = not args and not kwargs
        block = self.follower.module(self.is_known or self.follower.is_left_to_another)
        block.__enter__()
        self._running.append((self, block))
        if not self.is_known:
            return None
        follow = self.follower.following
        return torch_private.tree_map(lambda value: follow(value) if _is_of_user(value) else value, (args, kwargs))

    def end(self, module: nn.Module, args: Any, out: Any) -> None:
        if any(block is self for block, _ in self._running):  # or else `begin` refused the arguments
            while self._end_latest() is not self:
                pass  # a module within this one that the engine stopped, once a message had told all it has to
            if self.is_known and self._is_given_nothing:
                self.follower.marks.note_made_of_state(out)

    def _end_latest(self) -> _Block:
        block, running = self._running.pop()
        running.__exit__(None, None, None)
        return block
