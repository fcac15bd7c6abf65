"""What all ranks must agree on before a sharded call communicates, and the words when they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from shardpass.core.ranks import Ranks, agree, digest, diverged, memory_error
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Key, NeedsMessagesError, Program, Structure, check_row_wise, structure_of
from shardpass.errors import NeedsHaloError, RefusedError

_ATTEMPTS = 4
_REFUSALS = (NeedsHaloError, NeedsMessagesError, RefusedError)
"""From the mildest to the firmest."""
_WORDS = 62  # numbers in which a rank describes a call, padded: lengths must agree before contents can


class Offer(NamedTuple):
    """What one rank knows of a call besides its structure; all ranks read the offers of all.

    Args:
        has_sums: whether it has kept the sums of this call, whose inputs do not change.
        linear_map: fingerprint of the linear map that follows; see `describe_map`.
        end_maps: fingerprint of the linear maps of rows of the ends inside the message function.
        out_edges: the serial number of its `OutEdges`, or -1.
        mix: fingerprint of the tensor with which scores are mixed.
        sums, weights: the serial numbers of its `PartialSums` and of their weights, 0 of none, or -1.
    """

    has_sums: int = 0
    linear_map: int = 0
    end_maps: int = 0
    out_edges: int = -1
    mix: int = 0
    sums: int = -1
    weights: int = -1


class Agreed(NamedTuple):
    """What all ranks have agreed on.

    Args:
        program: with those edge tensors that every rank finds to have one row per edge.
        structure: of its message function.
        gradients: the inputs that need gradients on some rank.
        offers: of each rank, in rank order.
    """

    program: Program
    structure: Structure
    gradients: frozenset[Key]
    offers: list[Offer]


MakeOffer = Callable[[Program, Structure, bool], Offer]


def _in_words(program: Program) -> str:
    sides = {"src": "source", "dst": "destination", "edge": "edge"}
    found = [
        f"{sides[key.side]} {key.name!r} {str(t.dtype).removeprefix('torch.')} with {list(t.shape[1:])} per row"
        for key, t in program.inputs.items()
    ]
    return ", ".join(found) or "no tensors"


def _without(program: Program, keep: list[bool]) -> Program:
    kept = {name: program.edge[name] for name, k in zip(sorted(program.edge), keep) if k}
    return replace(program, edge=kept, depends_on=None)  # the message function uses the others whole


def settle(
    comm: Ranks,
    label: str,
    program: Program,
    edges: EdgeShards,
    num_own_src: int,
    make_offer: MakeOffer = lambda program, structure, needs_gradients: Offer(),
) -> Agreed:
    """What all ranks agree this call to be. Collective.

    An edge tensor is one on which every rank finds one row per edge. An input needs gradients if it does on any rank.
    Where ranks differ in these, they look at the message function again with what they have in common.

    Args:
        make_offer: says what this rank knows, given the structure and whether an input needs a gradient.

    Raises:
        RefusedError: on every rank, if the message function cannot be computed one shard at a time on any.
        DivergenceError: on every rank, if the ranks' message functions differ.
    """
    needed = {key: torch.is_grad_enabled() and tensor.requires_grad for key, tensor in program.inputs.items()}
    keys, flags = list(needed), list(needed.values())
    per_edge = [t.dim() > 0 and t.size(0) == edges.num_edges for _, t in sorted(program.edge.items())]
    refusal: Exception | None = None
    for _ in range(_ATTEMPTS):
        candidate = program if all(per_edge) else _without(program, per_edge)
        needs_grad = frozenset(key for key, flag in zip(keys, flags) if flag)
        structure, shape, refusal = _probe(comm, candidate, edges, num_own_src, needs_grad)
        mine = Offer() if structure is None else make_offer(candidate, structure, bool(needs_grad))
        if structure is not None and comm.size == 1:
            return Agreed(candidate, structure, needs_grad, [mine])
        text = f"inputs {[tuple(key) for key in keys]}, grad {torch.is_grad_enabled()}: {shape}"
        kind = next((i for i, known in enumerate(_REFUSALS, 1) if isinstance(refusal, known)), 0)
        answers = agree(comm, f"{label}: agreement", [digest(f"{flags} {per_edge} {kind} {text}"), *mine])
        if structure is not None and all(answer[0] == answers[0][0] for answer in answers):
            return Agreed(candidate, structure, needs_grad, [Offer(*answer[1:]) for answer in answers])
        values = [digest(text), kind, *map(int, flags), *map(int, per_edge)]
        described = agree(comm, f"{label}: differences", [len(values), *values, *[0] * (_WORDS - len(values))])
        rest = [answer[3 : 1 + len(values)] for answer in described]
        is_other_program = any(answer[0] != len(values) for answer in described)
        if is_other_program or all(answer == rest[0] for answer in rest):  # or they look at what they have in common
            _raise_refusal(comm, label, refusal, [answer[2] for answer in described])
        if is_other_program:
            break
        before, (flags, per_edge) = (flags, per_edge), _in_common(rest, len(flags))
        if (flags, per_edge) == before and all(r == rest[0] for r in rest):
            break
    if refusal is not None:
        raise refusal
    raise diverged(comm, label, f"{_in_words(program)} (computed as {text})")


def _in_common(answers: list[list[int]], num_inputs: int) -> tuple[list[bool], list[bool]]:
    """Which inputs need gradients on any rank, and which tensors are edge tensors on every rank."""
    columns = list(zip(*answers))
    return [any(column) for column in columns[:num_inputs]], [all(column) for column in columns[num_inputs:]]


def _probe(
    comm: Ranks, program: Program, edges: EdgeShards, num_own_src: int, needs_grad: frozenset[Key]
) -> tuple[Structure | None, str, Exception | None]:
    """The structure of `program`, its description, and the refusal in the place of both."""
    passed = program.findings.passed
    try:
        with comm.random_lock():  # the probe looks at the state of a generator that threads share
            structure, described = structure_of(program, edges, num_own_src, needs_grad)
            checked = described, torch.is_grad_enabled()
            if checked not in passed or comm.has_mixtures:
                check_row_wise(program, structure, edges.num_dst)
                passed.add(checked)
        return structure, described, None
    except Exception as error:  # a refusal; or a table is taken for an edge tensor, which other ranks know better
        lack = memory_error(error)  # nothing is known of the message function then
        if lack is not None:
            raise lack from None
        return None, "refused", error


def _raise_refusal(comm: Ranks, label: str, mine: Exception | None, kinds: list[int]) -> None:
    """Raise on every rank if any refused: the firmest refusal, in the words of the first rank that gave it."""
    worst = max(kinds)
    if worst == 0:
        return
    words = comm.all_gather_object("" if mine is None else str(mine), label=f"{label}: refusal")
    raise _REFUSALS[worst - 1](words[kinds.index(worst)])
