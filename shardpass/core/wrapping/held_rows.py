"""Where a script finds rows of a model besides its results: in attributes of its modules, and in forward hooks.

There they are followed as results are. While the model itself runs, its attributes hold plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardpass.core.following import Around
from shardpass.core.ranks import plain_of, torch_private


class HeldRows:
    """The attributes of a model's modules that held rows when a call of it ended that was followed."""

    def __init__(self) -> None:
        self._places: dict[tuple[nn.Module, str], None] = {}

    def find(self, model: nn.Module, around: Around) -> None:
        """Look for such attributes."""
        of_torch = vars(nn.Module())
        for module in model.modules():
            for name, value in vars(module).items():
                leaves = torch_private.tree_leaves(value) if name not in of_torch else []
                if any(type(leaf) is Tensor and around.holds_rows(leaf) for leaf in leaves):
                    self._places[module, name] = None

    def make_plain(self) -> None:
        """Give the model its own tensors back, before it runs."""
        self._replace(plain_of)

    def follow(self, around: Around) -> None:
        """Put what is followed in the place of tensors, after it has run."""
        self._replace(around.followed)

    def _replace(self, replacement: Callable[[Any], Any]) -> None:
        for module, name in self._places:
            if name in vars(module):
                vars(module)[name] = _replaced(vars(module)[name], replacement)


def _replaced(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """`value` with other tensors; lists and dicts stay the same objects, which a script may hold too."""
    if type(value) is list:
        value[:] = [_replaced(one, replacement) for one in value]
    elif type(value) is dict:
        value.update({key: _replaced(one, replacement) for key, one in value.items()})
    elif type(value) is tuple:
        return tuple(_replaced(one, replacement) for one in value)
    return replacement(value) if isinstance(value, Tensor) else value


@contextmanager
def followed_for_hooks(model: nn.Module, around: Around, is_on: bool = True) -> Iterator[None]:
    """A block in which the user's forward hooks of modules of `model` are given tensors that are followed."""
    with ExitStack() as before:
        for module in model.modules() if is_on else ():
            for hooks in torch_private.forward_hooks(module):
                for key, hook in hooks.items():
                    if not _is_of_engine(hook):
                        hooks[key] = partial(_given_followed, hook, around)
                        before.callback(hooks.__setitem__, key, hook)
        yield


def _is_of_engine(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("shardpass.")


def _given_followed(hook: Callable[..., Any], around: Around, module: nn.Module, *given: Any) -> Any:
    return torch_private.tree_map(plain_of, hook(module, *around.followed(given)))
