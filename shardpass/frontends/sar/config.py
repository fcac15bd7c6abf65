"""What scripts may set about how graphs communicate."""

from __future__ import annotations

from dataclasses import fields, replace

from shardpass.core.exchange import HaloPlan
from shardpass.core.ranks import Options, Ranks
from shardpass.frontends.dgl.structure import Edges
from shardpass.frontends.sar._state import STATE

LARGEST_MESSAGE = 1 << 30


class Config:
    """How graphs communicate. Assign to its attributes at any time, alike on all ranks; the next forward follows.

    Attributes:
        disable_sr: keep fetched rows for backward instead of fetching them again (``Options(mode="keep")``). A
            `DistributedBlock` keeps them anyway.
        max_collective_size: the most float32 elements of one message. Longer messages are split. With 0, messages of
            more than 1 GiB are split.
        pipeline_depth: how many rounds are fetched ahead of the one being computed, at least 1
            (``Options(prefetch=...)``).
    """

    disable_sr: bool = False
    max_collective_size: int = 0
    pipeline_depth: int = 1


def options() -> Options:
    """The options that `Config` stands for now. Raises `ValueError` if one of its attributes is not allowed."""
    depth, largest = Config.pipeline_depth, Config.max_collective_size
    for name, value, least in (("pipeline_depth", depth, 1), ("max_collective_size", largest, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"sar.Config.{name} is {value!r}; expected an integer that is at least {least}")
    return Options(mode="keep" if Config.disable_sr else "sar", prefetch=depth)


def words() -> str:
    """`Config` in words, which are the same on every rank. Raises as `options`."""
    chosen = options()
    return f"mode={chosen.mode}, prefetch={chosen.prefetch}, max_collective_size={Config.max_collective_size}"


def follow(comm: Ranks) -> None:
    """Have messages split as `Config` says now, and note that all ranks agree on it."""
    STATE.config = words()
    if hasattr(comm.inner, "max_message_bytes"):
        comm.inner.max_message_bytes = min(4 * Config.max_collective_size or LARGEST_MESSAGE, LARGEST_MESSAGE)


def agree_on_changes(comm: Ranks) -> None:
    """Follow `Config`. Collective if it was changed since; a divergence if it was not changed alike on every rank."""
    if words() != STATE.config:
        comm.barrier(f"sar.Config, which was changed to {words()}")
        follow(comm)


class ConfiguredEdges(Edges):
    """Edges whose plan follows `Config`: its options are those of the moment when a call reads it.

    Every call of the engine reads it, on every rank. So the first one after a change is where ranks agree on it.
    """

    _plan: HaloPlan

    @staticmethod
    def like(edges: Edges) -> ConfiguredEdges:
        """The same edges, which follow `Config` from now on."""
        return ConfiguredEdges(**{field.name: getattr(edges, field.name) for field in fields(edges)})

    @property  # type: ignore[override]
    def plan(self) -> HaloPlan:
        """The halo of the sources. Collective if `Config` was changed since it was read last."""
        agree_on_changes(self._plan.comm)
        now, wanted = self._plan.options, options()
        if (now.mode, now.prefetch) != (wanted.mode, wanted.prefetch):
            self._plan = replace(self._plan, options=replace(now, mode=wanted.mode, prefetch=wanted.prefetch))
        return self._plan

    @plan.setter
    def plan(self, plan: HaloPlan) -> None:
        self._plan = plan
