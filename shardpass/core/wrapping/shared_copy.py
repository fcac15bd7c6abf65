"""A copy of a model with the same parameters, so that one is trained on batches and the other runs on whole graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Ranks, tensor_digest
from shardpass.core.wrapping.replacing import Methods
from shardpass.errors import RefusedError


def shared_copy(model: nn.Module, comm: Ranks, wrap: Callable[..., nn.Module], methods: Methods) -> nn.Module:
    """A wrapped copy of `model`, in evaluation mode, that uses the present parameters and buffers of `model`.

    Collective, and so is every call. Batches leave different statistics in the buffers of the ranks (those of
    BatchNorm). Before a call, such buffers are set to their mean over ranks, in the model as well.

    Args:
        model: the model that is trained on batches.
        wrap: wraps the copy.
        methods: the methods of the wrapped copy, besides ``forward``, that are called from outside.

    Raises:
        RefusedError: the model is wrapped.
    """
    if getattr(model, "_shardpass_wrapped", False):
        raise RefusedError(
            "exact takes the ordinary model that is trained on batches, but this one is wrapped: call exact(model, "
            "comm) instead of wrap(model, comm), and use the model itself for batches"
        )
    held = [*model.parameters(), *model.buffers()]
    copied = wrap(copy.deepcopy(model, {id(tensor): tensor for tensor in held}).eval())
    copied._shardpass_wrapped.leave(copied)  # type: ignore[union-attr,operator]
    refresh = partial(_refresh, model, comm, copied)
    copied.register_forward_pre_hook(lambda *_: refresh())
    for name in methods(copied):
        getattr(copied, name).before = refresh  # an `OutermostCall`, which the model does not call itself
    return copied


def _refresh(model: nn.Module, comm: Ranks, copied: nn.Module) -> None:
    with torch.no_grad():
        _agree_on_buffers([b for b in model.buffers() if b.is_floating_point() and b.numel()], comm)
    modules = dict(copied.named_modules(remove_duplicate=False))
    # model.to() and load_state_dict(assign=True) make new tensors
    found = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for path, tensor in chain(*found):
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, tensor)


def _agree_on_buffers(buffers: list[Tensor], comm: Ranks) -> None:
    if not buffers or comm.size == 1:
        return
    own = torch.tensor([int(tensor_digest(buffer)[:14], 16) for buffer in buffers], device=comm.device)
    digests = torch.stack(comm.all_gather(own, "buffers of the model"))
    for buffer, same in zip(buffers, (digests == digests[0]).all(0).tolist()):
        if not same:
            total = comm.all_reduce(buffer.detach().to(comm.device, torch.float64).contiguous(), "sum", "buffers")
            buffer.copy_(total / comm.size)
