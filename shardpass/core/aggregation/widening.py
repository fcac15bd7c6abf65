"""Rows in half precision that a closed form combines with wider numbers.

Under autocast, a message multiplies rows in bfloat16 by weights in float32. Kernels take rows and results of one dtype,
so own rows are widened before they travel: a copy of each node, where the message function would make one of each edge.
An attention in half precision is computed in float32 as a whole, and its result is rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardpass.core.tracing import Key, Program, Sides, Structure, accumulator_dtype


def widened(program: Program, structure: Structure) -> tuple[Sides, Structure]:
    """The inputs of `program` in the dtypes in which its closed forms are computed, and its structure with them."""
    attention, wanted = structure.attention, dict[Key, torch.dtype]()
    if attention is None:
        wanted = {Key("src", r.source): r.dtype for r in structure.reductions if r.form == "scale"}
    elif attention.score is None:
        wanted = {Key("src", attention.value): structure.reductions[attention.output].dtype}
    else:
        wide = accumulator_dtype(structure.reductions[attention.output].dtype)
        wanted = {Key("src", name): wide for name in structure.sources_of(list(attention.members))}
        wanted[Key("dst", attention.score.destination)] = wide
        if attention.score.mix is not None and structure.mix is not None:
            captures = list(structure.captures)
            if captures:  # none without gradients
                captures[attention.score.mix] = captures[attention.score.mix].to(wide)
            structure = replace(structure, mix=structure.mix.to(wide), captures=tuple(captures))
    copies: dict[int, Tensor] = {}  # a tensor under two names is fetched once

    def given(key: Key, tensor: Tensor) -> Tensor:
        dtype = wanted.get(key, tensor.dtype)
        return tensor if tensor.dtype == dtype else copies.setdefault(id(tensor), tensor.to(dtype))

    return Sides.of((key, given(key, tensor)) for key, tensor in program.inputs.items()), structure
