"""`Estimate`: what one rank needs in one mode, by term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardpass.core.dryrun.rank import RankSizes
from shardpass.core.dryrun.trial import TERMS, Measured, Training, dry_run, extrapolate
from shardpass.core.ranks import Mode, Options

PROCESS_BYTES, COMPILED_BYTES, FIRST_BYTES = 14 << 20, 70 << 20, 22 << 20
"""What a training process needs outside torch's tensors, measured on a graph of 400 nodes.

The first figure is what the first epoch leaves behind: code, Python objects, the transport. The second is numba's, in a
process that runs its loops. The third is what a process needs for a moment in the first epoch;
later epochs of all but a small graph need more than that.
"""

_MADE, _FETCHED = 4e9, 1e9  # bytes per second; see `Estimate.seconds`
_EDGES, _EDGES_PER_BLOCK = 200_000, 8_000  # of the largest dry run: enough for several chunks of each block


@dataclass(frozen=True)
class Estimate:
    """What one rank is expected to need.

    Args:
        ranks, mode: of the run.
        terms: bytes of each term at the peak of training.
        loaded: bytes once the graph, its fields and the model are loaded, before the first epoch.
        loading: bytes at the peak of loading them.
        fetched: bytes that a rank fetches in one epoch.
        made: bytes of all results of operations in one epoch.
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
        """Bytes at the highest point, loading included. This is what a budget must hold."""
        return max(self.training, self.loading + self.terms["process"])

    @property
    def above_loaded(self) -> int:
        """Bytes at the peak of training above the loaded graph, fields and model, which is what a run measures."""
        return self.training - self.loaded

    @property
    def seconds(self) -> float:
        """A figure that ranks estimates: an epoch at 4 GB made and 1 GB fetched per second. It is no forecast."""
        return self.made / _MADE + self.fetched / _FETCHED


def estimate(training: Training, sizes: RankSizes, mode: Mode, options: Options) -> Estimate:
    """What a rank of these sizes needs in a mode, whatever mode `options` has.

    A small rank is run dry as it is. In place of a large one, two smaller ones are run.
    """
    options = replace(options, mode=mode, memory_budget=None, partial_sums=False)
    edges = max(_EDGES, _EDGES_PER_BLOCK * sizes.ranks)
    largest = max(sizes.num_edges / edges, sizes.num_nodes / edges)
    if largest <= 1:
        return Estimate.of(dry_run(training, sizes, options), sizes.ranks, mode)
    scales = (0.5 / largest, 1 / largest)
    small, large = (dry_run(training, sizes.scaled(scale), options) for scale in scales)
    return Estimate.of(extrapolate(small, large, scales), sizes.ranks, mode)
