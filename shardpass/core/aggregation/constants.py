"""Sums over in-edges of tensors that never change, kept between epochs: the features that enter the first layer.

A kept sum belongs to the very tensors it was computed from, at the version and with the content they had (see
`core/ranks/same_tensors.py`). All ranks decide together, for every call, whether kept sums are used: a rank that has to
compute its sum needs the others to send.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.ranks import checksum, torch_private
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Key, Program, Structure

MOST_KEPT = 2  # calls; the least recently used goes first


@dataclass(eq=False)  # found by identity; its tensors have no truth value
class _Kept:
    """One call: its inputs at their versions, its edges, its structure in words, its results once it came again."""

    inputs: list[tuple[Key, weakref.ref[Tensor], int]]
    edges: weakref.ref[EdgeShards]
    described: str
    values: dict[int, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)  # checksums of the inputs, once there are results

    def is_of(self, program: Program, structure: Structure, edges: EdgeShards) -> bool:
        if self.edges() is not edges:  # a layer may have a list of edges for each of many relations
            return False
        mine = _inputs(program)
        return (
            self.described == structure.describe()
            and [key for key, *_ in self.inputs] == list(mine)
            and all(
                known() is mine[key] and version == torch_private.version_of(mine[key])
                for key, known, version in self.inputs
            )
            and (not self.values or self.contents == [checksum(tensor) for tensor in mine.values()])
        )

    def is_lost(self) -> bool:
        gone = self.edges() is None or any(known() is None for _, known, _ in self.inputs)
        return gone or self.versions != [torch_private.version_of(value) for value in self.values.values()]


class ConstantSums:
    """The reductions of the last few calls over one halo plan that came twice with the same inputs."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def find(self, program: Program, structure: Structure, edges: EdgeShards) -> dict[int, Tensor] | None:
        """The values of all reductions, if they were kept and nobody has written into them."""
        kept = self._entry(program, structure, edges)
        return kept.values if kept is not None and kept.values else None

    def keep(self, program: Program, structure: Structure, edges: EdgeShards, values: dict[int, Tensor]) -> None:
        """Keep `values` if the call comes for the second time. Activations come once, so they are not kept."""
        if torch.is_inference_mode_enabled():
            return
        kept = self._entry(program, structure, edges)
        if kept is None:
            if is_constant(program, structure):
                inputs = [
                    (key, weakref.ref(tensor), torch_private.version_of(tensor))
                    for key, tensor in _inputs(program).items()
                ]
                self._kept.append(_Kept(inputs, weakref.ref(edges), structure.describe()))
            return
        kept.values, kept.versions = values, [torch_private.version_of(value) for value in values.values()]
        kept.contents = [checksum(tensor) for tensor in _inputs(program).values()]
        filled = [one for one in self._kept if one.values]
        if len(filled) > MOST_KEPT:
            self._kept.remove(filled[0])

    def _entry(self, program: Program, structure: Structure, edges: EdgeShards) -> _Kept | None:
        if torch.is_inference_mode_enabled():  # its tensors have no versions, and are of no use elsewhere
            return None
        self._kept = [kept for kept in self._kept if not kept.is_lost()]
        if not self._kept or not is_constant(program, structure):
            return None
        for position, kept in enumerate(self._kept):
            if kept.is_of(program, structure, edges):
                self._kept.append(self._kept.pop(position))
                return kept
        return None


def is_constant(program: Program, structure: Structure) -> bool:
    """Whether a call sums constant rows: nothing it reads needs a gradient, and kernels do all of it."""
    tensors = _inputs(program).values()
    if structure.edge_output or structure.captures or structure.random or structure.drops:
        return False
    if any(t.requires_grad or t.is_inference() for t in tensors):
        return False
    return all(r.form in ("copy", "scale", "ones") for r in structure.reductions)


def _inputs(program: Program) -> dict[Key, Tensor]:
    return dict(program.inputs.items())
