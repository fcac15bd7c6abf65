"""What a model's own code does with gradients of rows in backward: in hooks, and in functions of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.functions import FollowFunctions
from shardpass.core.ranks import torch_private

_LIBRARIES = ("torch", "torch_geometric", "dgl", "shardpass")


@contextmanager
def followed_hooks(model: nn.Module, follower: FollowRows) -> Iterator[None]:
    """A block in which modules that run take hooks of `model` that see gradients in a form that is followed."""
    with ExitStack() as before:
        for module in model.modules():
            for hooks in torch_private.backward_hooks(module):
                for key, hook in hooks.items():
                    hooks[key] = partial(_of_module, follower, hook)
                    before.callback(hooks.__setitem__, key, hook)
        yield


def _of_module(follower: FollowRows, hook: Callable[..., Any], module: nn.Module, *gradients: Any) -> Any:
    with _followed(follower, gradients):
        out = hook(module, *gradients)
    follower.marks.check_result(out)
    return out


def follow_functions(outputs: Iterable[Any], follower: FollowRows) -> None:
    """Follow the backward of each `torch.autograd.Function` of the user's that `outputs` were made by."""
    nodes, seen = [out.grad_fn for out in outputs if isinstance(out, Tensor)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        function = torch_private.function_of(node)
        if function is not None and function.__module__.partition(".")[0] not in _LIBRARIES:
            _Function(follower, node)


class _Function:
    """The hooks of one node of the graph of backward. Autograd restores the modes itself if backward fails."""

    def __init__(self, follower: FollowRows, node: Any) -> None:
        self.follower, self.block = follower, ExitStack()
        self.is_state = [before is None or hasattr(before, "variable") for before, _ in node.next_functions]
        node.register_prehook(self.begin)
        node.register_hook(self.end)

    def begin(self, gradients: Any) -> None:
        self.block.enter_context(_followed(self.follower, gradients))

    def end(self, found: Any, _: Any) -> None:
        self.block.close()
        marks = self.follower.marks
        for grad, is_state in zip(found, self.is_state):
            mixture = marks.mixtures.get(grad) if isinstance(grad, Tensor) else None
            if mixture is not None and not (mixture.is_sum and is_state):
                raise mixture.refusal()


@contextmanager
def _followed(follower: FollowRows, gradients: Any) -> Iterator[None]:
    follower.marks.recognise(gradients, is_given=True)
    with follower.paused(False), FollowFunctions(follower):
        yield
