"""Tensors that a model's forward holds between its layers, moved to a file once no layer is at work on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from shardpass.core.tracing import EdgeTrace


@contextmanager
def between_layers(
    model: nn.Module, move: Callable[[Tensor], bool], let_go: Callable[[list[Tensor]], None]
) -> Iterator[None]:
    """A ``with`` block in which `move` is offered what is alive between the layers of `model` and not in use.

    Whenever a module of the model begins or ends, everything that another one was given or has returned is offered:
    the outputs that are in a list for a jumping knowledge, the start of a skip connection. What a model is called with,
    its parameters and its buffers are not. Forwards in other threads and modules inside messages are left alone.

    Args:
        move: puts a tensor elsewhere and says whether it has.
        let_go: is told at the same times which tensors are in use.
    """
    passing = _Passing(model, move, let_go)
    mine = threading.get_ident()

    # functions and not methods: a copy of the model that is made meanwhile shares them
    def begins(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == mine and not _is_in_message():
            passing.begin((args, kwargs))

    def ends(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() == mine and not _is_in_message():
            passing.end([*_tensors_in((args, kwargs))], [*_tensors_in(output)])

    begins.only_watches = ends.only_watches = True  # type: ignore[attr-defined]
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(module.register_forward_hook(ends, with_kwargs=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def only_watch(hooks: Mapping[int, Any]) -> bool:
    """Whether the hooks of a module are all `between_layers`'s, which change nothing."""
    return all(getattr(hook, "only_watches", False) for hook in hooks.values())


def _is_in_message() -> bool:
    """Whether the body of a message runs, whose tensors are followed by their storages."""
    return any(isinstance(mode, EdgeTrace) for mode in _get_current_function_mode_stack())


class _Passing:
    """What has passed between layers and is still alive."""

    def __init__(
        self, model: nn.Module, move: Callable[[Tensor], bool], let_go: Callable[[list[Tensor]], None]
    ) -> None:
        self._move, self._let_go, self._depth = move, let_go, 0
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._given: set[int] = set()
        self._alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def begin(self, args: Any) -> None:
        """A module begins."""
        inputs = [*_tensors_in(args)]
        if self._depth == 0:  # these are the caller's
            self._given = {id(t) for t in [*inputs, *_held_by(args)] if id(t) not in self._alive}
        self._depth += 1
        self._note(inputs)
        self._offer(inputs)

    def end(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A module has ended, by an exception if there are no `outputs`."""
        self._depth -= 1
        self._note(outputs)
        self._offer([*inputs, *outputs])

    def _note(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._given and id(tensor) not in self._buffers:
                self._alive[id(tensor)] = tensor

    def _offer(self, in_use: list[Tensor]) -> None:
        numbers = {id(tensor) for tensor in in_use}
        for number, tensor in list(self._alive.items()):
            if number not in numbers and self._move(tensor):
                del self._alive[number]
        self._let_go(in_use)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The plain tensors in tuples, lists and dicts."""
    if type(value) is Tensor:
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _held_by(value: Any) -> list[Tensor]:
    """The tensors in objects, as deep as they lie: the fields of a `Data` or of a graph."""
    found, stack, seen = [], [value], set()
    while stack:
        one = stack.pop()
        if isinstance(one, (type, nn.Module, str, int, float)) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, dict):  # another mapping may load what it is asked for
            stack += one.values()
        elif isinstance(one, (tuple, list)):
            stack += one
        else:
            stack += getattr(one, "__dict__", {}).values()
    return found


def is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor, array or view shares the memory of `tensor`, so that it can be put elsewhere."""
    # numpy arrays do not count as users; a storage of which one was made says that it must not be resized
    can_move = tensor._base is None and tensor.untyped_storage().resizable()
    return can_move and _num_users(tensor) == _num_users(torch.empty(1))


def _num_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()  # is a user itself
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]
