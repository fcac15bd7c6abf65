"""A sum over in-edges and a linear map after it, in the cheaper order: ``(A x) W^T = A (x W^T)``."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.tracing import Key, Program, Structure


def describe_map(weight: Tensor | None) -> str:
    """What ranks must have in common, besides the program, to apply the map of `weight` before the sum."""
    if weight is None:
        return "none"
    autocast = torch.is_autocast_enabled(weight.device.type)
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    return f"{list(weight.shape)} {weight.dtype}, autocast {autocast}, gradient {needs_grad}"


def transformed_first(
    program: Program, structure: Structure, gradients: frozenset[Key], weight: Tensor, keeps_sums: bool
) -> tuple[Program, Structure, frozenset[Key]] | None:
    """The program with `weight` applied to its source rows, its structure and gradients; `None` if not cheaper.

    The caller knows that the node function does no more than scale rows. With the map first, narrower rows travel, and
    the sum need not be saved for the gradient of `weight`, which becomes the gradient of a map of the own rows.

    Args:
        gradients: the inputs that need gradients on some rank, agreed by all.
        weight: ``[out_channels, in_channels]``; `describe_map` says the same of it on every rank.
        keeps_sums: sums of rows without gradients are kept between epochs, so the map stays behind those.
    """
    sums = [(k, reduction) for k, reduction in enumerate(structure.reductions) if reduction.form != "ones"]
    if len(sums) != 1 or structure.edge_output or weight.dim() != 2:
        return None
    k, reduction = sums[0]
    out_channels, in_channels = weight.shape
    name = reduction.source
    if reduction.op != "sum" or reduction.base.value or reduction.form not in ("copy", "scale"):
        return None
    if (
        reduction.tail != (in_channels,)
        or out_channels > in_channels
        or (keeps_sums and Key("src", name) not in gradients)
    ):
        return None
    rows, message = program.src[name], structure.message
    if not isinstance(message, Tensor) or rows.dtype != weight.dtype or torch.is_autocast_enabled(rows.device.type):
        return None
    if torch.is_grad_enabled() and weight.requires_grad:
        gradients |= {Key("src", name)}
        reduction = replace(reduction, differentiable=True)
    reductions = list(structure.reductions)
    reductions[k] = replace(reduction, tail=(out_channels,))
    message = message if out_channels == in_channels else message[:, :out_channels]
    narrow = replace(structure, reductions=tuple(reductions), message=message)
    return replace(program, src={**program.src, name: F.linear(rows, weight)}), narrow, gradients
