"""``update_all`` and ``apply_edges`` of one edge type, as programs for the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation import aggregate
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Findings, Inputs, Key, Program, Sides
from shardpass.errors import InternalError, RefusedError
from shardpass.frontends.dgl.frames import all_of, hidden_in
from shardpass.frontends.dgl.functions import is_builtin, message_of, operands, reducer_of
from shardpass.frontends.dgl.structure import Edges
from shardpass.frontends.dgl.udf import EdgeFunction, Packing

_PLACES = "place of the edge"
_EMPTY = {"max": -math.inf, "min": math.inf}
Fields = Mapping[str, Tensor]


class MessagePassing:
    """Message passing over the edges of one type.

    Args:
        edges: the structure.
        src, dst, edata: the data of their sources, destinations and themselves.
        findings: by message function, what earlier calls found out about it.
    """

    def __init__(self, edges: Edges, src: Fields, dst: Fields, edata: Fields, findings: dict[Any, Findings]) -> None:
        self.edges, self.src, self.dst, self.edata, self.findings = edges, src, dst, edata, findings

    def reduced(self, message: Any, reducer: Any) -> dict[str, Tensor]:
        """What a built-in `reducer` makes of the messages: ``{field: [num_dst, ...]}``. Collective.

        A destination without messages holds infinity under max and min, as in DGL before it is stored; if the graph has
        no edge of this type at all, it holds 0.
        """
        op = reducer_of(reducer, message.out_field if is_builtin(message) else None)
        program, computed = self.program_of(message, f"{op} of ")

        def only(inputs: Inputs) -> Tensor:
            found = computed(inputs)
            if reducer.msg_field not in found:
                raise KeyError(f"the reduce function reads {reducer.msg_field!r}, but the message has {sorted(found)}")
            rows = found[reducer.msg_field]
            if not rows.is_floating_point():
                raise RefusedError(
                    f"{op} of messages of {rows.dtype}: DGL reduces floating point numbers only. Convert them"
                )
            return rows

        program.message = only
        if op in _EMPTY:
            program.edge[_PLACES] = self.edges.places
            if program.reads is not None:
                program.reads.add(Key("edge", _PLACES))
            program.aggregate = self._extremum(op)
        else:
            program.aggregate = summed
        out = aggregate(program, self.edges.plan, self.edges.shards)
        if op == "mean":
            degrees = self.edges.in_degrees.clamp(min=1).to(out.dtype)
            out = out / degrees.view(-1, *[1] * (out.dim() - 1))
        return {reducer.out_field: out}

    def per_edge(self, message: Any, chosen: Tensor | None = None) -> dict[str, Tensor]:
        """What a message function gives for every own edge: ``{field: [num_edges, ...]}``. Collective.

        Args:
            chosen: the positions of the edges to compute. The rows of other edges are 0.
        """
        shards = self.edges.shards if chosen is None else self.edges.only(chosen)
        packing, found = Packing(), {}
        done: set[torch.dtype] = set()
        only: torch.dtype | None = None
        while True:
            found.update(self._packed(message, shards, packing, only))
            done |= {value.dtype for value in found.values()}
            left = [dtype for dtype in packing.dtypes.values() if dtype not in done]
            if not left:
                return {name: found[name] for name in packing.dtypes}
            only = left[0]

    def _packed(
        self, message: Any, shards: EdgeShards, packing: Packing, only: torch.dtype | None
    ) -> dict[str, Tensor]:
        program, computed = self.program_of(message, "edges of ")
        program.message = lambda inputs: packing.pack(computed(inputs), only)
        program.parts = lambda: packing.parts
        return packing.unpack(aggregate(program, self.edges.plan, shards))

    @property
    def where(self) -> str:
        """The edge type, in the words that names of calls end with."""
        name = self.edges.canonical[1]
        return "" if name == "_E" else f" over {name!r}"

    def only_read_by(self, message: Any) -> MessagePassing:
        """The same with no other data than a built-in `message` reads, as they are now."""
        read = self._read_by(message)
        return MessagePassing(self.edges, read.src, read.dst, read.edge, self.findings)

    def _read_by(self, message: Any) -> Sides:
        """The tensors that a built-in `message` reads."""
        frames = {"src": self.src, "dst": self.dst, "edge": self.edata}
        return Sides.of((key, frames[key.side][key.name]) for key in operands(message))

    def program_of(self, message: Any, what: str) -> tuple[Program, Callable[[Inputs], dict[str, Tensor]]]:
        """A program that reads what `message` reads, and the function that computes its fields on some edges.

        Args:
            what: the words before the name of the message in the name of the program.
        """
        canonical, where = self.edges.canonical, self.where
        if is_builtin(message):
            computed = message_of(message)
            read = self._read_by(message)
            program = Program(f"{what}{message.name}{where}", read.src, read.dst, read.edge, computed, None)
            program.findings = self.findings.setdefault(message.name, Findings())
            return program, lambda inputs: {message.out_field: computed(inputs)}
        reads: set[Key] = set()
        function = EdgeFunction(message, canonical, reads, hidden_in(self.src))
        given = all_of(self.src), all_of(self.dst), all_of(self.edata)
        program = Program(f"{what}{function.name}{where}", *given, _unset, None, reads=reads)
        return program, function

    def _extremum(self, op: str) -> Callable[[Tensor, Inputs], Tensor]:
        comm, empty = self.edges.plan.comm, _EMPTY[op] if self.edges.total else 0.0

        def extremum(messages: Tensor, inputs: Inputs) -> Tensor:
            assert comm.watch is not None
            dtype = torch.promote_types(messages.dtype, torch.float32)
            places = inputs.edge[_PLACES].to(dtype).view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
            pairs = torch.stack([messages.to(dtype), places], -1)
            return comm.watch.reduced(f"first_{op}", pairs, empty).select(-1, 0).to(messages.dtype)

        return extremum


def _unset(inputs: Inputs) -> Tensor:
    raise InternalError("a program ran before its message function was set")


def summed(messages: Tensor, inputs: Inputs) -> Tensor:
    """The sum of messages per destination."""
    return messages.new_zeros((inputs.num_dst, *messages.shape[1:])).index_add(0, inputs.index, messages)


def without_infinity(rows: Tensor) -> Tensor:
    """`rows` with 0 for infinite values, which is DGL's rule for nodes without messages under max and min."""
    return torch.where(torch.isinf(rows), torch.zeros_like(rows), rows) if rows.is_floating_point() else rows
