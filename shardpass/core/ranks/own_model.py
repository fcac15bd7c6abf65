"""A model for each rank. Ranks that are threads could be given the same one, and would overwrite its values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shardpass.core.ranks.random import are_threads
from shardpass.core.ranks.ranks import Ranks
from shardpass.errors import RefusedError

_BYTES = 8


def is_wrapped(model: nn.Module, comm: Ranks) -> bool:
    """Whether `model` is wrapped already, for these ranks. Not collective.

    Raises:
        RefusedError: it is wrapped for other ranks: another rank, which is a thread, or an earlier run has wrapped it.
    """
    if not getattr(model, "_shardpass_wrapped", False):
        return False
    if getattr(model.forward, "comm", comm) is not comm:
        raise RefusedError(
            f"{type(model).__name__} is wrapped already, with another communicator (by another rank, which is a thread "
            f"of this process, or in an earlier run): build a model on each rank, or wrap copy.deepcopy of one that "
            f"is not wrapped"
        )
    return True


def refuse_shared_model(model: nn.Module, comm: Ranks) -> None:
    """Raise if ranks hold the same model, or the same trainable parameters. Collective if ranks are threads.

    Raises:
        RefusedError: they do. It is raised on every rank.
    """
    if are_threads(comm):
        mine = [id(model), *(id(parameter) for parameter in model.parameters() if parameter.requires_grad)]
        _refuse_alike(comm.all_gather_object(mine, "wrap: a model for each rank"))


def identity_of(parameters: Sequence[Tensor], comm: Ranks) -> list[int]:
    """Bytes that tell these parameters from those of other threads; none if ranks are processes."""
    if not are_threads(comm):
        return []
    trained = next((id(parameter) for parameter in parameters if parameter.requires_grad), 0)
    return list(trained.to_bytes(_BYTES, "little"))


def refuse_alike(identities: list[list[int]]) -> None:
    """Raise if `identity_of` returned the same on two ranks.

    Raises:
        RefusedError: they did.
    """
    numbers = [int.from_bytes(bytes(given), "little") for given in identities]
    _refuse_alike([[number] if number else [] for number in numbers])


def _refuse_alike(held: list[list[int]]) -> None:
    for rank, mine in enumerate(held):
        for other in range(rank):
            if set(mine) & set(held[other]):
                raise RefusedError(
                    f"ranks {other} and {rank} hold the same model, or parameters of it: they are threads of one "
                    f"process, and gradients would be added up in one place. Build the model in the function that each "
                    f"rank runs, or copy.deepcopy it there"
                )
