"""A wrapped model that `torch.compile` compiles: its own code is, and its layers are calls out of it.

[Note: what is compiled]
The tracer of `torch.compile` can read neither what stands for an edge list nor how ranks exchange rows. So it stops at
the wrapped model, which runs as ever up to the code that its user, or PyG, wrote. That code alone is compiled. It gets
an `OpaqueEdges` for each edge list, hands it on to layers, and the tracer stops at these again. Whether the code does
anything else with an edge list is known from the calls that are followed, which are not compiled: then none is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_PLAIN = (Tensor, nn.Parameter, int, float, bool, str)


class OpaqueEdges:
    """Stands for an edge list in code that is compiled."""

    def __init__(self, edges: ShardedEdgeIndex) -> None:
        self.edges = edges


class OpaqueModule:
    """What a call of a layer runs in a model that is compiled: the layer as it is."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch_private.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = torch_private.SET_COMPILER(None)
        try:
            args, kwargs = with_edges((args, kwargs))
            return torch_private.call_as_written(self.module, *args, **kwargs)
        finally:
            torch_private.SET_COMPILER(compiler)


def not_compilable(given: Any, reads_edges: bool, checkpoints: bool) -> str | None:
    """Why code that is given `given` is not compiled; `None` if it is.

    Args:
        reads_edges: it may do something else with edge lists than to hand them on.
        checkpoints: activations are computed again in backward.
    """
    leaves = torch_private.tree_leaves(given)
    if checkpoints:
        return 'checkpoint="activations" computes again what it computes'
    others = [leaf for leaf in leaves if leaf is not None and type(leaf) not in _PLAIN and not _is_edge_list(leaf)]
    if others:
        return f"the tracer cannot read a {type(others[0]).__name__}, which it is given"
    if reads_edges and any(map(_is_edge_list, leaves)):
        return "it computes with edge_index itself, or was wrapped with check=False, so that nobody knows"
    return None


def run_compiled(
    compiler: Any, model: nn.Module, is_layer: Callable[[nn.Module], bool], run: Callable[..., Any], args: Any,
    kwargs: Any,
) -> Any:  # fmt: skip
    """What ``run(*args, **kwargs)`` returns, code of `model` that is compiled.

    Args:
        compiler: what `torch_private.SET_COMPILER` gave.
        is_layer: whether the tracer stops at a module.
    """
    for module in model.modules():
        if is_layer(module):
            torch_private.set_call(module, OpaqueModule)
    args, kwargs = torch_private.tree_map(_opaque, (args, kwargs))
    torch_private.SET_COMPILER(compiler)
    try:
        out = run(*args, **kwargs)
    except (AttributeError, TypeError) as error:
        if OpaqueEdges.__name__ not in str(error):
            raise
        raise RefusedError(
            f"{type(model).__name__} is compiled, and does with an edge list what it did in none of the calls that "
            f"were looked at: {error}. Call the model uncompiled"
        ) from error
    finally:
        torch_private.SET_COMPILER(None)
    return with_edges(out)


def with_edges(value: Any) -> Any:
    """`value` with the edge lists that stand-ins in it stand for."""
    return torch_private.tree_map(lambda leaf: leaf.edges if isinstance(leaf, OpaqueEdges) else leaf, value)


def _opaque(leaf: Any) -> Any:
    return OpaqueEdges(leaf) if _is_edge_list(leaf) else leaf


def _is_edge_list(leaf: Any) -> bool:
    return isinstance(leaf, ShardedEdgeIndex) and not getattr(leaf, "is_data", False)
