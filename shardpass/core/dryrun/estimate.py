"""`Estimate`: what one rank needs in one mode, by term; and which of several to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardpass.core.dryrun.trial import TERMS, Measured
from shardpass.core.ranks import MODES, Mode

PROCESS_BYTES, COMPILED_BYTES, FIRST_BYTES = 14 << 20, 70 << 20, 22 << 20
"""What a training process comes to need outside torch's tensors, measured on a graph of 400 nodes: code and Python
objects that the first epoch leaves, transport; numba's, where its loops run; and what the process needs for a moment in
the first epoch (the self-check), which only a small graph does not need more than later."""

_MADE, _FETCHED = 4e9, 1e9  # bytes per second; see `Estimate.seconds`


@dataclass(frozen=True)
class Estimate:
    """What one rank is expected to need.

    Args:
        ranks, mode: of the run.
        terms: bytes of each term at the peak of training.
        loaded: bytes once graph, fields and model are loaded, before the first epoch.
        loading: bytes at the peak of loading them.
        fetched: bytes that a rank fetches in one epoch.
        made: bytes of all that operations make in one epoch.
        phase: where the peak is.
    """

    ranks: int
    mode: Mode
    terms: dict[str, int]
    loaded: int
    loading: int
    fetched: int
    made: int
    phase: str

    @classmethod
    def of(cls, found: Measured, ranks: int, mode: Mode) -> Estimate:
        """The estimate that a dry run gives."""
        phase, terms = max(found.phases, key=lambda entry: sum(entry[1].values()))
        rounded = {term: round(terms[term]) for term in TERMS}
        later = sum(rounded.values()) - round(found.loaded)
        rounded["process"] = max(PROCESS_BYTES + COMPILED_BYTES * found.compiled, FIRST_BYTES - later)
        loaded, loading, sent, made = (round(n) for n in (found.loaded, found.loading, found.sent, found.made))
        return cls(ranks, mode, rounded, loaded, loading, sent, made, phase)

    @property
    def training(self) -> int:
        """Bytes at the peak of training."""
        return sum(self.terms.values())

    @property
    def peak(self) -> int:
        """Bytes at the highest point, loading included: what a budget must hold."""
        return max(self.training, self.loading + self.terms["process"])

    @property
    def above_loaded(self) -> int:
        """Bytes at the peak of training above the loaded graph, fields and model: what a run measures."""
        return self.training - self.loaded

    @property
    def seconds(self) -> float:
        """A figure by which estimates are ranked, not a forecast: an epoch at 4 GB made and 1 GB fetched per second."""
        return self.made / _MADE + self.fetched / _FETCHED


def fastest(estimates: Iterable[Estimate], budget: int | None) -> Estimate | None:
    """The estimate with the least `seconds` among those that fit; of equal ones the smallest. None: nothing fits."""
    fitting = [estimate for estimate in estimates if budget is None or estimate.peak <= budget]
    return min(fitting, key=lambda e: (e.seconds, e.peak, MODES.index(e.mode)), default=None)
