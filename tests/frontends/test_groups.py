"""Groups of ranks, each with a graph of its own, and gradients averaged over the groups, by whoever does that."""

import re

import pytest
import torch

import shardpass as sp

from .groups_program import (
    accumulations,
    all_used,
    alone,
    by_parts,
    checkpoints,
    optimizer_of,
    read,
    refusals,
    trainings,
    with_states,
)

CASES = [
    ((2, 2), "by hand"),
    ((2, 2), "ddp"),
    ((2, 2), "ddp, finding unused"),
    ((2, 2), "fsdp"),
    ((2, 2), "fsdp, resharding"),
    ((2, 2), "fsdp over all"),
    ((1, 4), "ddp"),
    ((4, 1), "ddp, finding unused"),
    ((4, 1), "fsdp"),
]


@pytest.mark.processes
@pytest.mark.long
def test_as_one_process_that_averages_the_losses():
    found = sp.spawn(trainings, 4, "processes", args=(CASES,))
    for rank, results in enumerate(found):
        for (shape, how), steps in zip(CASES, results):
            torch.testing.assert_close(
                torch.tensor(steps), torch.tensor(alone(shape[0], how)), rtol=0, atol=1e-10,
                msg=lambda text, told=f"{shape} {how} on rank {rank}": f"{told}: {text}",
            )  # fmt: skip


@pytest.mark.processes
@pytest.mark.long
def test_checkpoints_of_torch_are_read_by_other_groups(tmp_path):
    found = sp.spawn(checkpoints, 4, "processes", args=(str(tmp_path),))
    for saved, *others in (found[0][:3], found[0][3:]):
        assert others == [saved, saved]
    for how, saved in (("fsdp", found[0][0]), ("ddp", found[0][3])):
        net = all_used()
        optimizer = optimizer_of(net)
        read(f"{tmp_path}/{how}", net, optimizer)
        assert with_states(net, optimizer) == saved


@pytest.mark.processes
@pytest.mark.long
def test_gradients_that_accumulate():
    for differences in sp.spawn(accumulations, 4, "processes"):
        assert max(differences) < 1e-12


@pytest.mark.processes
@pytest.mark.long
def test_several_calls_and_clipping():
    for by_hand, *others in sp.spawn(by_parts, 4, "processes"):
        for other in others:
            torch.testing.assert_close(torch.tensor(other), torch.tensor(by_hand), rtol=0, atol=1e-12)


REFUSALS = [
    "RefusedError: DistributedDataParallel around the wrapped model is refused: it averages gradients over ranks that",
    "RefusedError: (FSDP)?Net: parameter 'unused' is sharded over processes .* register_fsdp_forward_method",
    "RefusedError: (FSDP)?Net: parameter 'first.lin_l.weight' is sharded over processes .* in one piece",
    "RefusedError: an argument of a model that fully_shard has sharded requires a gradient",
    "RefusedError: no_sync: fully_shard takes the gradients .*set_requires_gradient_sync",
    "RefusedError: fully_shard has sharded '0.weight', rows that ranks own already: .* ignored_params",
    "RefusedError: sync_parameters: parameter 'unused' is sharded over processes .* before fully_shard",
    "RefusedError: save_checkpoint.*: parameter 'unused' is sharded over processes .* torch.distributed.checkpoint",
    "RefusedError: sync_gradients: parameter 'unused' is sharded over processes",
    "RefusedError: DistributedDataParallel averages gradients, .* with process_group= the ranks that share no graph",
    "RefusedError: FSDPNet: parameter 'unused' is sharded over processes .*: wrap the model first",
    r"ValueError: connect: the mesh has 2 dimensions .* connect\(mesh\['data'\]\) or connect\(mesh\['graph'\]\)",
    "ValueError: connect: got a mesh and `group=`",
    "TypeError: connect: the first argument is the name of a backend or a DeviceMesh, but got ProcessGroup",
]
OUTSIDE = r"ValueError: connect: process \d is not in the mesh of the processes \[0, 1\]"


@pytest.mark.processes
def test_refusals():
    for rank, told in enumerate(sp.spawn(refusals, 4, "processes")):
        for text, pattern in zip(told, [*REFUSALS, "nothing" if rank < 2 else OUTSIDE], strict=True):
            assert re.match(pattern, text), text
