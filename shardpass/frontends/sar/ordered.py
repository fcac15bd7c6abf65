"""One order of backward for models that are not wrapped: hooks that `sync_params` registers.

[Note: why sync_params hooks the model]
Ranks take part in one backward only if autograd visits the same collective calls on each, in one order; see the note in
`autograd_order.py`. `shardpass.dgl.wrap` sees to it in the outermost forward. The models of SAR's scripts are plain
modules, but every script hands its model to `sync_params` once, which hooks the outermost forward. The hooks are
module-level functions, so that a hooked model can be copied and pickled.

A model that was never passed to `sync_params` still runs. Only the data that flow between its calls then tie them
together. If a rank's loss does not reach a call that the losses of other ranks reach, all ranks get an error.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

from torch import nn

from shardpass.core.ranks import drop_chain, end_chain, start_chain, torch_private
from shardpass.core.training import DistributedBatchNorm
from shardpass.core.wrapping import EmptyRows
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.layers import adapt
from shardpass.frontends.dgl.refusals import refuse_unsupported
from shardpass.frontends.sar._state import STATE, communicator


def make_ready(model: nn.Module) -> None:
    """Adapt the modules of `model` that need it, in place, and hook its forward. A model that is ready stays as it is.

    Raises:
        RefusedError: the model holds a layer that cannot be exact on a sharded graph.
    """
    if getattr(model, "_shardpass_wrapped", False) or torch_private.has_forward_hook(model, _begin):
        return
    refuse_unsupported(model)
    adapt(model)
    _warn_of_local_norms(model)
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _warn_of_local_norms(model: nn.Module) -> None:
    comm = communicator()
    if comm.size == 1 or comm.rank != 0:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch_private.AnyBatchNorm) and not isinstance(module, DistributedBatchNorm):
            warnings.warn(
                f"{type(module).__name__} at {name!r} takes its statistics from the nodes of its own rank, so results "
                f"depend on the partition: use sar.DistributedBN1D, which takes those of all ranks",
                stacklevel=4,
            )
            return


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    if STATE.comm is None:
        return  # a pickled model in a process of its own
    outermost, leaving = start_chain(STATE.comm), ExitStack()
    STATE.forwards.append((model, outermost, leaving))
    graphs = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedDGLGraph)]
    if outermost and any(graph.lacks_rows for graph in graphs):
        leaving.enter_context(EmptyRows())


def _end(model: nn.Module, args: Any, output: Any) -> Any:
    if not STATE.forwards or STATE.forwards[-1][0] is not model:
        return None  # `_begin` did not run: there are no ranks, or a hook of the user failed before it
    _, outermost, leaving = STATE.forwards.pop()
    leaving.close()
    if not outermost:
        return None
    comm = communicator()
    try:
        return end_chain(comm, output)
    finally:
        drop_chain(comm)
