"""A copy of a model with the same parameters, so that one is trained on batches and the other runs on whole graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Ranks
from shardpass.core.training.checkpoint_file import digest
from shardpass.errors import RefusedError


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` that holds its parameters and buffers themselves, in evaluation mode. Not collective.

    Raises:
        RefusedError: the model is wrapped.
    """
    if getattr(model, "_shardpass_wrapped", False):
        raise RefusedError(
            "exact takes the ordinary model that is trained on batches, but this one is wrapped: call exact(model, "
            "comm) instead of wrap(model, comm), and use the model itself for batches"
        )
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held}).eval()


def follow(copied: nn.Module, model: nn.Module, comm: Ranks, methods: Iterable[str] = ()) -> None:
    """Let every call of `copied` use the present parameters and buffers of `model`. Calls are collective.

    Batches leave different statistics in the buffers of the ranks (those of BatchNorm). Before a call, such buffers are
    set to their mean over ranks, in the model as well.

    Args:
        copied: made by `shared_copy` of `model`.
        model: the model that is trained on batches.
        comm: the ranks.
        methods: names of further methods that are called from outside, such as ``encode``. They have an attribute
            `before`, which is called when they are, but not when the model calls them itself.
    """
    refresh = partial(_refresh, model, comm, copied)
    copied.register_forward_pre_hook(lambda *_: refresh())
    for name in methods:
        getattr(copied, name).before = refresh


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
    own = torch.tensor([int(digest(buffer)[:14], 16) for buffer in buffers], device=comm.device)
    digests = torch.stack(comm.all_gather(own, "buffers of the model"))
    for buffer, same in zip(buffers, (digests == digests[0]).all(0).tolist()):
        if not same:
            total = comm.all_reduce(buffer.detach().to(comm.device, torch.float64).contiguous(), "sum", "buffers")
            buffer.copy_(total / comm.size)
