"""The form in which a script is given rows: a tensor whose operations are followed."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from shardpass.core.following.row_count import leaves_of
from shardpass.core.following.user_line import is_asked_by, user_line
from shardpass.core.ranks import FollowedTensor, Ranks, ResultWatch, plain_of, torch_private
from shardpass.errors import RefusedError

_NOTE = "shardpass"


class Judge(ResultWatch, Protocol):
    """What runs the functions of torch that are given rows in this form."""

    comm: Ranks

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a torch function returns for arguments of which some are followed."""
        ...

    def note_function(self, out: Tensor, plain: Tensor, like: Tensor | None) -> None:
        """Note that a `torch.autograd.Function` has returned `out`, whose other name is `plain`."""
        ...


class FollowedOutput(FollowedTensor):
    """What a wrapped model returned, or what was made of it: another name for the tensor `plain`."""

    @property
    def around(self) -> Judge:  # type: ignore[override]
        return self._held()[0]

    @property
    def plain(self) -> Tensor:  # type: ignore[override]
        return self._held()[1]

    def _held(self) -> tuple[Judge, Tensor]:
        held: tuple[Judge, Tensor] | None = vars(self).get("held")
        with torch_private.DisableTorchFunctionSubclass():
            node = self.grad_fn
            if held is None or (torch_private.function_of(node) is not None and vars(self).get("node") is not node):
                held, self.node = _held_after_function(self, held), node
                self.held = held
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = leaves_of((args, [*(kwargs or {}).values()]))
        around = next(leaf.around for leaf in leaves if isinstance(leaf, FollowedOutput))
        if func is Tensor.size and around.comm.forward is None and is_asked_by(torch_private.VMAP_SIZES):
            raise RefusedError(
                f"{user_line()}: a functional transform outside of the model hides from shardpass what is computed of "
                f"rows. Write the function for all rows at once, or call it in a method of the model"
            )
        return around.run(func, args, kwargs or {})


def _held_after_function(out: FollowedOutput, held: tuple[Judge, Tensor] | None) -> tuple[Judge, Tensor]:
    """What `out` holds, which a `torch.autograd.Function` has returned: made in its forward, or given to it."""
    plain = out.as_subclass(Tensor)
    before = [] if out.grad_fn is None else [_notes(node) for node, _ in out.grad_fn.next_functions if node is not None]
    given = [notes[_NOTE] for notes in before if _NOTE in notes]
    if held is None:
        held = next((one for one in given if one[1].data_ptr() == plain.data_ptr()), None)
    around, like = held or (given[0][0], None)
    around.note_function(out, plain, like)
    return around, plain


def named(leaf: Tensor, around: Judge) -> FollowedOutput:
    """Another name for `leaf`, of which `around` follows what becomes."""
    with torch_private.DisableTorchFunctionSubclass():
        found: FollowedOutput = leaf.as_subclass(FollowedOutput)
        found.held = around, leaf
        if found.grad_fn is not None:
            _notes(found.grad_fn)[_NOTE] = found.held
            found.grad_fn.register_prehook(_plain_gradients)  # of a Function that has kept what it was given
    return found


def _notes(node: Any) -> dict[str, Any]:
    return node.metadata  # type: ignore[no-any-return]


def _plain_gradients(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(plain_of, gradients))
