"""Random numbers: the same initialisation on every rank, different dropout.

Ranks that are processes have a generator each. `seed` makes the generators equal, so models that are built next are
equal. ``wrap`` then calls `decorrelate`, which gives every rank its own random numbers. They depend only on the seed
and the rank.

Ranks that are threads of one process share its generators. They take turns (`Communicator.take_turns`) until the first
forward of a wrapped model, and after each `seed`: meanwhile each rank has generators of its own, as a process does.
Dropout on threads differs between ranks, and between runs.

`seed` leaves Python's and NumPy's generators alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.ranks import torch_private
from shardpass.core.ranks.ranks import Ranks, require_ranks
from shardpass.errors import RefusedError


def seed(seed: int, comm: Ranks) -> AbstractContextManager[None]:
    """Give torch the same seed on every rank, so that models built next are the same on every rank. Collective.

    Args:
        seed: the same on every rank, in [0, 2**63).
        comm: the ranks.

    Returns:
        A context manager, which you may ignore. Its block starts from the seed again, and must not communicate.

    Raises:
        ValueError: on every rank, if the seeds differ or one is not an integer in range.
    """
    require_ranks(comm, "seed(seed, comm)")
    seeds = comm.all_gather_object(repr(seed), "seed")
    if len(set(seeds)) > 1:
        rank = next(rank for rank, other in enumerate(seeds) if other != seeds[0])
        raise ValueError(
            f"seed: every rank must pass the same seed, found {seeds[0]} on rank 0 and {seeds[rank]} on rank {rank}"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2**63), found {seed!r}")
    comm.take_turns()
    torch.manual_seed(seed)
    return _seeded(seed, comm)


def decorrelate(comm: Ranks) -> None:
    """Give every rank its own random numbers, from the seed that rank 0 set last and the rank. Collective.

    With one rank the generator is left as it is, so that a run in one process draws what it would draw in plain torch.
    """
    if comm.size == 1:
        return
    initial = comm.all_gather_object(torch.initial_seed(), "decorrelate")[0]
    with comm.random_lock():
        torch.manual_seed(derive_seed(initial, comm.rank))
    comm.barrier("decorrelate")  # ranks may be threads: nobody's forward pass may see another set the seed


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on nothing but `parts`, and differs where they do."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw_seed(comm: Ranks) -> int:
    """A seed for this rank's own random numbers, drawn from torch's generator."""
    with comm.random_lock():  # another thread may be replaying with the shared generator
        return int(torch.randint(2**62, ()))


def piece_seed(seed: int, position: int, first_edge: int = 0) -> int:
    """The seed of the edges from `first_edge` on of the block at `position`, in a call whose seed is `seed`."""
    return hash((seed, position, first_edge)) & (2**63 - 1)


@contextmanager
def replayed(comm: Ranks, seed: int) -> Iterator[None]:
    """A block in which torch draws the numbers that follow from `seed`. Torch's generator is afterwards as before.

    Raises:
        RefusedError: ranks are threads, and an operation draws that does not take a generator.
    """
    if are_threads(comm):  # another rank may draw in the meantime
        with _OwnGenerator(seed):
            yield
        return
    with torch.random.fork_rng(devices=[comm.device] if comm.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def refuse_checkpointed_draws(comm: Ranks) -> AbstractContextManager[Any]:
    """A block in which code under `torch.utils.checkpoint` may not draw random numbers if ranks are threads.

    Backward would set torch's generator back to draw the same numbers again, and meanwhile other ranks draw from it.

    Raises:
        RefusedError: such code draws.
    """
    return _CheckpointedDraws(comm) if are_threads(comm) else nullcontext()


def are_threads(comm: Ranks) -> bool:
    """Whether the ranks are threads of one process, which share the generator."""
    return comm.size > 1 and not isinstance(comm.random_lock(), nullcontext)


class _CheckpointedDraws(TorchFunctionMode):
    def __init__(self, comm: Ranks) -> None:
        super().__init__()
        self._comm = comm

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hooks = torch_private.saved_tensor_hooks()
        under = "" if hooks is None else getattr(hooks[0], "__module__", "")
        if under != "torch.utils.checkpoint" or self._comm.watch is not None:
            return func(*args, **kwargs)
        with Draws() as draws:
            out = func(*args, **kwargs)
        if draws.any:
            raise RefusedError(
                "random numbers (as of dropout) are drawn within torch.utils.checkpoint, and ranks that are threads "
                "share the generator from which backward would draw them again: gradients would be wrong. Run the "
                "ranks as processes (mpirun or torchrun), or use wrap(..., checkpoint='activations') instead"
            )
        return out


class _OwnGenerator(torch_private.TorchDispatchMode):
    """Operations of this thread draw from a generator of its own instead of torch's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_random(func, args, kwargs):
            return _with_generator(func)(*args, **kwargs, generator=self._generator)
        return func(*args, **kwargs)


def has_drawn(state: dict[str, Tensor], again: Callable[[], Any]) -> bool:
    """Whether code that has just run draws random numbers. If so, torch's generators are set back.

    Args:
        state: what `get_random_state` returned before the code ran.
        again: runs the code again. If the generators have moved, this shows whether the code or another thread drew.
    """
    if all(torch.equal(before, now) for before, now in zip(state.values(), get_random_state().values())):
        return False
    with Draws() as draws:
        again()
    if draws.any:
        set_random_state(state)
    return draws.any


class Draws(torch_private.TorchDispatchMode):
    """Notices whether this thread draws from torch's own generator.

    Attributes:
        any: whether it has.
    """

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.any |= _is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation of torch, as a dispatch mode sees it, draws from torch's own generator."""
    given = any(isinstance(value, torch.Generator) for value in [*args, *kwargs.values()])
    return torch.Tag.nondeterministic_seeded in func.tags and not given


def _with_generator(func: Any) -> Any:
    packet, names = func.overloadpacket, torch_private.argument_names(func)
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        if torch_private.argument_names(overload) == names | {"generator"}:
            return overload
    raise RefusedError(
        f"{func} draws random numbers inside message() and does not take a generator: ranks that are threads share "
        f"torch's, so backward could not draw the same again. Run the ranks as processes (mpirun or torchrun)"
    )


def get_random_state() -> dict[str, Tensor]:
    """The states of torch's generators by device type, uint8 vectors on the CPU; CUDA's once it is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Restore what `get_random_state` returned, but not the state of a device that this process lacks."""
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def dropout_factors(seed: int, edges: Tensor, heads: int, p: float, dtype: torch.dtype) -> Tensor:
    """The factors of dropout, 0 with probability `p`, else ``1 / (1 - p)``: ``[len(edges), heads]``.

    Each factor depends only on the seed, the edge and the head, so it is the same in whatever order and pieces edges
    are processed. Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014) over a counter.
    """
    counter = edges.to(torch.int64).view(-1, 1) * heads + torch.arange(heads, device=edges.device)
    bits = (counter * _signed(0x9E3779B97F4A7C15)).add_(_signed(seed))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_((bits >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    bits.bitwise_xor_((bits >> 31) & ((1 << 33) - 1))
    kept = (bits & ((1 << 53) - 1)) >= int(p * (1 << 53))
    return kept.to(dtype).div_(1 - p if p < 1 else 1)


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


@contextmanager
def _seeded(seed: int, comm: Ranks) -> Iterator[None]:
    with comm.random_lock():
        torch.manual_seed(seed)
        yield
