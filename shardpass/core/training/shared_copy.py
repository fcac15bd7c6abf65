"""A copy of a model with the same parameters, so that one is trained on batches and the other runs on whole graphs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardpass.core.ranks import Ranks
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

    Statistics that batches leave in buffers (those of BatchNorm) differ between ranks; before a call, buffers that do
    are set to their mean over ranks, on the model as well.

    Args:
        methods: names of further methods that are called from outside, such as ``encode``.
    """
    refresh = partial(_refresh, model, comm, copied)
    copied.register_forward_pre_hook(lambda *_: refresh())
    for name in methods:
        setattr(copied, name, partial(_refreshed, refresh, getattr(copied, name)))


def _refreshed(refresh: Callable[[], None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    refresh()
    return method(*args, **kwargs)


def _refresh(model: nn.Module, comm: Ranks, copied: nn.Module) -> None:
    originals = dict(model.named_modules())
    with torch.no_grad():
        _agree_on_buffers(model, comm)
    for name, module in copied.named_modules():
        theirs = originals[name]
        module._parameters.update(theirs._parameters)  # model.to() and load_state_dict(assign=True) make new ones
        module._buffers.update(theirs._buffers)


def _agree_on_buffers(model: nn.Module, comm: Ranks) -> None:
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not buffers or comm.size == 1:
        return
    raw = [hashlib.blake2b(_bytes(buffer), digest_size=7).digest() for buffer in buffers]
    own = torch.tensor([int.from_bytes(digest, "little") for digest in raw], device=comm.device)
    digests = torch.stack(comm.all_gather(own, "buffers of the model"))
    for buffer, same in zip(buffers, (digests == digests[0]).all(0).tolist()):
        if not same:
            total = comm.all_reduce(buffer.detach().to(comm.device, torch.float64).contiguous(), "sum", "buffers")
            buffer.copy_(total / comm.size)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
