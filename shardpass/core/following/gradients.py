"""What a model's own code does with gradients in backward: in hooks, and in functions of its own.

The gradient of rows has those rows. The gradient of what has no rows, such as a weight, is this rank's part of a sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.marks import Marks
from shardpass.core.following.refusals import Mixture, within_no_sync
from shardpass.core.following.row_count import leaves_of
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import (
    Ranks,
    RowSet,
    SummedModels,
    autograd_leaves,
    end_derivatives,
    is_made_of_parameters,
    is_summed_before,
    summed,
    torch_private,
)

_LIBRARIES = ("torch", "torch_geometric", "dgl", "shardpass")
_NOTE = "shardpass"
_WATCHED = "shardpass_watched"
Block = Callable[[], Any]
"""Makes a block whose operations are followed."""


def followed_hook(
    follower: FollowRows, block: Block, hook: Callable[[Tensor], Any], rows: Rows | None
) -> Callable[[Tensor], Any]:
    """A hook of the user's for the gradient of a tensor that holds `rows`, or none; one of torch's own as it is."""
    if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):  # of `fully_shard`, for its parameters
        return hook

    def followed(grad: Tensor) -> Any:
        with block():
            _mark(follower, grad, rows)
            out = hook(grad)
        _check(follower, [out], rows is None)
        return out

    return followed


@contextmanager
def followed_hooks(model: nn.Module, follower: FollowRows, block: Block) -> Iterator[None]:
    """A block in which modules that run take hooks of `model` that see gradients in a form that is followed."""
    with ExitStack() as before:
        for module in model.modules():
            for hooks in torch_private.backward_hooks(module):
                for key, hook in hooks.items():
                    hooks[key] = partial(_of_module, follower, block, hook)
                    before.callback(hooks.__setitem__, key, hook)
        yield


def _of_module(
    follower: FollowRows, block: Block, hook: Callable[..., Any], module: nn.Module, *gradients: Any
) -> Any:  # fmt: skip
    follower.marks.recognise(gradients, is_given=True)
    with block():
        out = hook(module, *gradients)
    _check(follower, torch_private.tree_leaves(out), False)
    return out


def follow_function(follower: FollowRows, block: Block, out: Any, rows: Rows | None) -> None:
    """Follow the backward of the `torch.autograd.Function` of the user's that has made `out`, if one has."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    if node is None or _own_function(node) is None:
        return
    metadata: Any = node.metadata
    known = metadata.setdefault(_NOTE, {})
    if not known:
        ran, are_state = list[Any](), [_is_state(before) for before, _ in node.next_functions]
        node.register_prehook(partial(_begin, follower, block, known, ran))
        node.register_hook(partial(_end, follower, are_state, known, ran))
    known[out.output_nr] = rows


def function_of_user(outputs: Iterable[Tensor]) -> Any:
    """The first `torch.autograd.Function` of the user's with which `outputs` were computed; `None` if none was."""
    nodes = _nodes_before(tensor.grad_fn for tensor in outputs)
    return next((function for node in nodes if (function := _own_function(node)) is not None), None)


def _own_function(node: Any) -> type | None:
    function = torch_private.function_of(node)
    is_own = function is not None and function.__module__.partition(".")[0] not in _LIBRARIES
    return function if is_own else None


def _gives_parameters(node: Any) -> bool:
    return getattr(torch_private.function_of(node), "gives_parameters", False)


def _nodes_before(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph from which `roots` have come, and these; up to what gives parameters."""
    nodes, seen = [*roots], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if not _gives_parameters(node):
                nodes += [before for before, _ in node.next_functions]


def _begin(
    follower: FollowRows, block: Block, known: dict[int, Rows | None], ran: list[Any], gradients: Sequence[Any]
) -> None:  # fmt: skip
    for place, rows in known.items():
        if gradients[place] is not None:
            _mark(follower, gradients[place], rows)
    ran.append(block())
    ran[-1].__enter__()  # autograd restores the modes itself where backward fails


def _end(
    follower: FollowRows, are_state: list[bool], known: dict[int, Rows | None], ran: list[Any], found: Any, _: Any
) -> None:
    ran.pop().__exit__(None, None, None)
    for grad, is_state in zip(found, are_state):
        _check(follower, [grad], is_state or not any(known.values()))


def _is_state(node: Any) -> bool:
    """Whether what a node of autograd has made, or the leaf that it stands for, is made of parameters alone."""
    for before in _nodes_before([node]):
        function = torch_private.function_of(before)
        if _gives_parameters(before):
            continue
        if function is not None and function.__module__.startswith("shardpass."):
            return False
        if hasattr(before, "variable") and not isinstance(before.variable, nn.Parameter):
            return False
    return True


def _mark(follower: FollowRows, grad: Tensor, rows: Rows | None) -> None:
    if rows is not None:
        follower.marks.mark(grad, rows)
        return
    follower.mark_plain(grad)  # whatever its size
    of = next(iter(follower.marks.known), RowSet.fetched(0))
    follower.marks.mixtures.add(grad, Mixture("backward", user_line(), of, is_sum=True))


def _check(follower: FollowRows, found: Sequence[Any], may_be_sum: bool) -> None:
    for grad in found:
        mixture = follower.marks.mixtures.get(grad) if isinstance(grad, Tensor) else None
        if mixture is not None and not (mixture.is_sum and may_be_sum):
            raise mixture.refusal()


def gradients_here(given: dict[str, Any], marks: Marks) -> list[Tensor | None]:
    """What ``torch.autograd.grad(**given)`` returns. A rank that lacks rows may not use what others use: zeros there.

    Raises:
        RuntimeError: torch's, where something is not used though this rank has rows of all kinds.
    """
    if given.get("allow_unused", False) or given.get("materialize_grads", False):
        return [*torch.autograd.grad(**given)]
    inputs = [*torch_private.tree_leaves(given["inputs"])]
    found = [*torch.autograd.grad(**{**given, "allow_unused": True})]
    lacks_rows = any(rows.count == 0 for rows in marks.known)
    for place, (one, grad) in enumerate(zip(inputs, found)):
        if grad is None and not lacks_rows and one.numel():
            raise RuntimeError(
                f"The differentiated Tensor at index {place} appears to not have been used in the graph. Set "
                f"allow_unused=True if this is the desired behavior."
            )
        if grad is None:
            found[place] = torch.zeros_like(one)
    return found


def gradients_around(
    func: Any, args: Any, kwargs: Any, roots: list[Tensor], marks: Marks, comm: Ranks, follow: Callable[[Any], Any]
) -> Any:  # fmt: skip
    """What ``backward`` or ``torch.autograd.grad`` of `roots` returns in a script; `follow` makes what is followed."""
    if func is not torch.autograd.grad:
        func(*args, **kwargs)
        end_derivatives(comm, ())  # which would keep the graph of autograd alive
        return None
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    inputs = torch_private.tree_leaves(given["inputs"])
    if any(map(comm.caches.of(SummedModels).wait_for, inputs)):
        raise within_no_sync(user_line())
    found = tuple(end_derivatives(comm, gradients_here(given, marks)))
    if not note_gradients(marks, found, inputs, roots):
        return found
    return tuple(grad if grad is None or is_made_of_parameters(grad) else follow(grad) for grad in found)


def note_gradients(marks: Marks, found: Any, inputs: Iterable[Any], roots: Sequence[Tensor]) -> bool:
    """Note that gradients by rows are rows, and by a script's own tensor a part of a sum; whether any is either.

    Args:
        found: the gradients of `roots` by `inputs`.
    """
    mixtures = [mixture for root in roots if (mixture := marks.mixtures.get(root)) is not None]
    of = [*(mixture.of for mixture in mixtures), *marks.sets_in(roots), *marks.known]
    met = bool(mixtures) or any(root in marks.whole or marks.rows_of(root) is not None for root in roots)
    noted = False
    for grad, one in zip(found, inputs):
        if not isinstance(grad, Tensor):
            continue
        if marks.rows_of(one) is not None:
            marks.copy(grad, one)
        elif met and of and type(one) is Tensor and not is_summed_before(one):
            marks.mixtures.add(grad, Mixture("grad", user_line(), of[0], is_sum=True))
        else:
            continue
        noted = True
    return noted


def watch_gradients(tensors: Iterable[Tensor], sets: Sequence[RowSet], tell: Callable[[], None]) -> None:
    """Call `tell` where ``backward`` gives a gradient to a leaf of a script's own that was given beside rows."""
    counts = {of.count for of in sets}
    for tensor in tensors if counts else ():
        if type(tensor) is not Tensor or not tensor.requires_grad:
            continue
        for leaf in autograd_leaves(tensor):
            is_own = type(leaf) is Tensor and leaf.is_leaf and not is_summed_before(leaf)
            if is_own and not hasattr(leaf, _WATCHED) and not counts.intersection(leaf.shape):
                setattr(leaf, _WATCHED, True)  # one hook, however often it meets rows
                leaf.register_post_accumulate_grad_hook(lambda _: tell())


def gradients_taken(
    follower: FollowRows, is_alike: Callable[[Tensor], bool], rows_of: Callable[[Tensor], Rows | None], args: Any,
    kwargs: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What ``torch.autograd.grad`` gives within a model: by rows it is rows, and by anything else alike on all ranks.

    Collective, as backward of the layers that lie between them is. Of what every rank computes alike, each rank
    differentiates its share.
    """
    given = inspect.signature(torch.autograd.grad).bind(*args, **kwargs).arguments
    inputs, outputs, marks = [*leaves_of(given["inputs"])], [*leaves_of(given["outputs"])], follower.marks
    follower.differentiates = True
    roots = [torch_private.unwrapped(leaf) for leaf in outputs]
    sums = [mixture for root in roots if (mixture := marks.mixtures.get(root)) is not None]
    for mixture in sums:
        if not mixture.is_sum:
            raise mixture.refusal()
    for leaf in leaves_of(given.get("grad_outputs")):
        marks.check_result(leaf)
    are_alike = [is_alike(root) for root in roots]
    is_of_rows = bool(sums or marks.sets_in(roots)) or any(are_alike) or any(root in marks.whole for root in roots)
    others = [i for i, leaf in enumerate(inputs) if rows_of(leaf) is None and marks.mixtures.get(leaf) is None]
    with follower.paused():  # backward of the model visits its sharded calls once more, in their order
        size = 1 if follower.ranks is None else follower.ranks.size
        given["outputs"] = [leaf / size if one else leaf for leaf, one in zip(outputs, are_alike)]
        found = gradients_here({**given, "retain_graph": True}, marks)
        if is_of_rows and others and follower.ranks is not None and size > 1:
            is_graph = torch.is_grad_enabled() and bool(given.get("create_graph", False))
            totals = _over_ranks([inputs[i] for i in others], [found[i] for i in others], follower.ranks, is_graph)
            for i, total in zip(others, totals):
                found[i] = total
    for leaf, grad in zip(inputs, found):
        rows = rows_of(leaf)
        if grad is not None and rows is not None:
            is_batched = bool(given.get("is_grads_batched", False))
            marks.mark(grad, replace(rows, dim=rows.dim + is_batched, points_to=None))
        elif grad is not None and is_of_rows:
            follower.mark_plain(grad)
    return tuple(found)


def _over_ranks(leaves: list[Tensor], parts: list[Tensor | None], ranks: Ranks, is_graph: bool) -> list[Tensor | None]:
    """The sums over ranks of gradients by tensors without rows; `None` where no rank found one. Collective."""
    told = ranks.all_gather_object([part is not None for part in parts], "gradients by what has no rows")
    is_found = [any(flags) for flags in zip(*told)]
    with torch.set_grad_enabled(is_graph):
        return [
            summed(torch.zeros_like(leaf) if part is None else part, ranks, "gradient") if one else None
            for leaf, part, one in zip(leaves, parts, is_found)
        ]
