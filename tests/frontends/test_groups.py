"""Groups of ranks, each with a graph of its own, and gradients averaged over the groups, by whoever does that."""

import pytest
import torch

import shardpass as sp

from .groups_program import accumulations, all_used, alone, checkpoints, flat, optimizer_of, read, refusals, trainings

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
        read(f"{tmp_path}/{how}", net, optimizer_of(net))
        assert flat(net) == saved


@pytest.mark.processes
@pytest.mark.long
def test_gradients_that_accumulate():
    for differences in sp.spawn(accumulations, 4, "processes"):
        assert max(differences) < 1e-12


@pytest.mark.processes
@pytest.mark.long
def test_refusals():
    for told in sp.spawn(refusals, 4, "processes"):
        print(*told, sep="\n")
