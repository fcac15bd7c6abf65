"""The message function of a PyG layer as the engine runs it on some of the edges: the layer's own methods and hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.following import user_line
from shardpass.core.ranks import is_out_of_memory
from shardpass.core.tracing import Inputs, NeedsMessagesError
from shardpass.errors import RefusedError, ShardpassError
from shardpass.frontends.pyg.arguments import Arguments, rows_back, rows_first
from shardpass.frontends.pyg.dense import holding, whole_neighbourhoods
from shardpass.frontends.pyg.frozen import Frozen
from shardpass.frontends.pyg.lazy import LazyEdges
from shardpass.frontends.pyg.private import with_hooks


class MessageFunction:
    """`message` and `aggregate` of a layer, called with what PyG would have collected for some of the edges.

    Args:
        conv: the layer.
        arguments: of both methods.
        lazy: edge updates that the message function computes itself, by name.
        held: names of edge tensors that the layer keeps as attributes while it runs.
        frozen: the layer as it was in forward.
    """

    def __init__(
        self, conv: MessagePassing, arguments: Arguments, lazy: Mapping[str, LazyEdges], held: Sequence[str],
        frozen: Frozen,
    ) -> None:  # fmt: skip
        self._conv, self._arguments, self._lazy, self._held, self._frozen = conv, arguments, lazy, held, frozen
        self._given: dict[str, Any] = {}  # in the latest run
        self._is_tuple, self._shapes, self._stored = False, list[torch.Size](), list[str]()  # of its messages

    def message(self, inputs: Inputs) -> Any:
        """The messages of some edges, one row each; a tuple where `message` returns one."""
        conv, given = self._conv, self._given
        with self._frozen.as_in_forward():
            given.clear()
            given.update(self._arguments.collected(inputs))
            for name, value in self._lazy.items():
                given[name] = value.message(inputs, f"{name}:")
            with holding(conv, {name: given[name] for name in self._held}):
                wanted = conv.inspector.collect_param_data("message", given)
                try:
                    messages = with_hooks(conv, "message", (wanted,), lambda found: conv.message(**found))
                except (RuntimeError, IndexError) as error:
                    if is_out_of_memory(error):
                        raise
                    raise self._explained(error, inputs) from error
        if not isinstance(messages, (Tensor, tuple, list)):
            raise RefusedError(
                f"{user_line()}: message() of {type(conv).__name__} returns a {type(messages).__name__}: return a "
                f"tensor, or a tuple of them"
            )
        messages, num_edges = rows_first(messages, conv.node_dim), inputs.index.numel()
        if isinstance(messages, Tensor) and messages.dim() and messages.size(0) > num_edges:
            raise RefusedError(
                f"{user_line()}: message() of {type(conv).__name__} returns {messages.size(0)} rows for {num_edges} "
                f"edges. Messages are computed in pieces, each from its edge alone: rows of nodes join them in "
                f"aggregate() or update(), or are added to what propagate() returns"
            )
        return messages

    def _explained(self, error: Exception, inputs: Inputs) -> Exception:
        """What to raise where `message` failed on some edges: it may read a tensor of all edges that `forward` kept."""
        if "in the TorchScript interpreter" in str(error):
            return RefusedError(
                f"{user_line(error)}: message() of {type(self._conv).__name__} calls a function that torch.jit.script "
                f"has compiled, in which shardpass cannot see what it does to edges. Call it uncompiled, or in a "
                f"method of the layer by its global name"
            )
        for name, kept in vars(self._conv).items():
            if isinstance(kept, Tensor) and kept.dim() and kept.size(0) not in (1, inputs.index.numel()):
                return RefusedError(
                    f"message() fails on some of the edges ({error}). Does it read `self.{name}`, which has "
                    f"{kept.size(0)} rows? Messages are computed in pieces: pass it to propagate() as an argument"
                )
        return error

    def side_by_side(self, inputs: Inputs) -> Tensor:
        """The messages of some edges, and what `message` stored on the layer, side by side: ``[E, columns]``."""
        messages = self.message(inputs)
        self._is_tuple = isinstance(messages, tuple)
        stored = {name: rows for name, rows in self._frozen.stored().items() if rows.size(0) == inputs.index.numel()}
        self._stored = list(stored)
        parts = [*(messages if self._is_tuple else [messages]), *stored.values()]
        self._shapes = [part.shape[1:] for part in parts]
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise RefusedError(f"message() returns or stores tensors of several dtypes ({dtypes}): convert them to one")
        return torch.cat([part.flatten(1) for part in parts], 1) if len(parts) > 1 else parts[0]

    def apart(self, rows: Tensor) -> Any:
        """What `message` returned, with the nodes where it had them, of what `side_by_side` gave for all edges.

        What it stored on the layer is stored there again.
        """
        parts = [rows]
        if len(self._shapes) > 1:
            columns = rows.split([shape.numel() for shape in self._shapes], 1)
            parts = [part.unflatten(1, shape) for part, shape in zip(columns, self._shapes)]
        count = len(parts) - len(self._stored)
        self._frozen.store(dict(zip(self._stored, parts[count:])))
        return rows_back(tuple(parts[:count]) if self._is_tuple else parts[0], self._conv.node_dim)

    def reduce(self, messages: Any, inputs: Inputs) -> Any:
        """What the layer's `aggregate` makes of messages."""
        conv, given = self._conv, self._given
        given = given if inputs.index is given.get("index") else self._arguments.collected(inputs)
        messages = rows_back(messages, conv.node_dim)
        with self._frozen.as_in_forward(), whole_neighbourhoods(conv, inputs.max_degree):
            wanted = conv.inspector.collect_param_data("aggregate", given)
            try:
                return with_hooks(conv, "aggregate", (wanted,), lambda found: conv.aggregate(messages, **found))
            except (RuntimeError, IndexError) as error:
                failed = error.__cause__ if isinstance(error, RefusedError) else error  # where rows are followed
                whole = [name for name in wanted if name in self._arguments.edge and name not in inputs.edge]
                if not whole or failed is None or isinstance(failed, ShardpassError) or is_out_of_memory(failed):
                    raise
                raise NeedsMessagesError(f"aggregate() takes {whole}, which may be rows of all own nodes") from error

    def release(self) -> None:
        """Drop what is an input of the call: what a message function holds lives until backward."""
        self._arguments.release()
        self._given.clear()
