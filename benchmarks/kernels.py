"""Measure the kernels one by one beside the memory bandwidth of the machine, on one fixed random graph.

    python -m benchmarks.kernels --nodes 50000 --edges 1500000 --json kernels.json

Each kernel runs in one thread, in CPU seconds, the best of several runs; with ``--device cuda`` in seconds from an idle
GPU to an idle GPU, which include the launch. Its bound is the time that the bytes it must
move take at the speed of a copy, measured in the same process between the kernels (bytes read plus bytes written).
Rows of nodes that are gathered count once for each edge, as if no cache held them, so a table that fits into the cache
may beat the bound. Indices and what is once per node are left out. E edges, F = heads * width numbers in a row,
H heads, S bytes in a number:

    sum, max, weighted sum (one weight, H weights)      E F S,  E F S,  E (F + 1) S,  E (F + H) S
    edge dot (H results)                                E (F + H) S
    attention forward    GAT  E (F + 2 H) S     GATv2  E F S     dot  2 E F S
    attention backward   GAT  E (F + 4 H) S     GATv2, dot  4 E F S

Forward, GAT gathers a row of values and one of scores; GATv2 reads one row for both; dot a key and a value. Backward
they gather a row of the output's gradient. GAT adds three numbers per head (its destination's share of the score,
log-sum-exp, delta), and one to be written; the other two gather the destination's row and read and write its gradient.
Max backward gathers a row of values and one of gradients: 2 E F S.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core import kernels
from shardpass.core.kernels import ClosedScores, Outer, RowRun, ScoreGradients, SoftmaxState, fused
from shardpass.core.sharding import Block, Chunk, Shard, Transposes, build_shards
from shardpass.core.tracing import REDUCERS, AdditiveScore, Base, DotScore, MixedScore, Score


class Measured(NamedTuple):
    """One kernel: seconds, the bytes it must move, copy bandwidth in bytes/s, and seconds over those of a copy.

    Attributes:
        problem: why there are no seconds.
    """

    name: str
    seconds: float
    bytes: int
    bandwidth: float
    problem: str = ""

    @property
    def ratio(self) -> float:
        return self.seconds * self.bandwidth / self.bytes


class Case:
    """The graph and its tensors; `kernels` gives what to run and how many bytes it must move."""

    def __init__(
        self,
        num_nodes: int,
        num_edges: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=generator).to(device)
        self.shard: Shard = build_shards(src, dst, [Block(0, 0, num_nodes)], num_nodes).shards[0]
        self.transposes = Transposes()
        self.num_nodes, self.num_edges, self.heads, self.width = num_nodes, num_edges, heads, width
        self.x, self.y, self.grad, self.out, self.other = (
            torch.randn((num_nodes, heads, width), generator=generator, dtype=dtype).to(device) for _ in range(5)
        )
        self.scalars = torch.rand(num_edges, generator=generator, dtype=dtype).to(device)
        self.per_head = torch.rand((num_edges, heads), generator=generator, dtype=dtype).to(device)
        self.mix = torch.randn((heads, width), generator=generator, dtype=dtype).to(device)

    def kernels(self) -> dict[str, tuple[Callable[[], object], int]]:
        """``{name: (what to run, bytes it must move)}``."""
        shard, x, grad, out, other = self.shard, self.x, self.grad, self.out, self.other
        number, row = self.num_edges * x.itemsize, self.num_edges * x.itemsize * self.heads * self.width
        best = REDUCERS["max"].init(self.num_nodes, x.shape[1:], x)

        @cache  # made by the first call, which is not timed, so that one kernel that fails leaves the others
        def value() -> Tensor:
            kernels.gather_extremum("max", best, shard, x)
            return REDUCERS["max"].value(best, Base())

        found: dict[str, tuple[Callable[[], object], int]] = {}
        for label, weight, more in (
            ("sum", None, 0),
            ("weighted sum", self.scalars, number),
            ("weighted sum per head", self.per_head, number * self.heads),
        ):
            found[label] = lambda w=weight: kernels.gather_sum(out, shard, x, w, fresh=True), row + more
            back = lambda w=weight: kernels.gather_sum_transposed(other, shard, self.transposes, grad, w, fresh=True)  # noqa: E731
            found[f"{label}, transposed"] = back, row + more
        found["max"] = lambda: kernels.gather_extremum("max", best, shard, x), row
        found["max, backward"] = (
            lambda: kernels.gather_extremum_transposed(other, shard, self.transposes, x, value(), grad),
            2 * row,
        )
        dots = row + number * self.heads
        found["edge dot"] = lambda: kernels.edge_dot(shard, x, grad, 1 << 16), row + number
        found["edge dot per head"] = lambda: kernels.edge_dot(shard, x, grad, 1 << 16, self.heads), dots
        forms: dict[str, tuple[Score, int, int]] = {
            "GAT": (AdditiveScore("a", "b", 0.2), row + 2 * self.heads * number, row + 4 * self.heads * number),
            "GATv2": (MixedScore("a", "b", 0.2, 0), row, 4 * row),
            "dot": (DotScore("a", "b", self.width**-0.5), 2 * row, 4 * row),
        }
        for name, (form, forward, backward) in forms.items():
            if not fused.handles(form, x):
                continue
            first, second = self._attention(form)
            found[f"attention forward, {name}"], found[f"attention backward, {name}"] = (
                (first, forward),
                (second, backward),
            )
        return found

    def _attention(self, form: Score) -> tuple[Callable[[], object], Callable[[], object]]:
        shard, values = self.shard, self.x
        additive = isinstance(form, AdditiveScore)
        source = values[:, :, :1].contiguous() if additive else self.y if isinstance(form, DotScore) else values
        of_dst = (self.grad[:, :, :1] if additive else self.grad).contiguous()
        of = ClosedScores(form, source, of_dst, self.mix if isinstance(form, MixedScore) else None, None)
        whole = Chunk(0, self.num_edges, 0, self.num_nodes)
        indptr, columns, positions = self.transposes.of(shard, with_order=True)
        by_destination = RowRun(shard.indptr, whole, shard.src_rows, slice(0, self.num_edges))
        by_source = RowRun(indptr, whole, columns, positions)
        state = SoftmaxState.fresh(self.num_nodes, self.heads, self.width, values)
        grad_values = torch.zeros_like(values)

        @cache
        def outer() -> Outer:
            fused.accumulate(state, by_destination, of, values)
            return Outer(self.grad, torch.randn_like(state.total), state.top + state.total.log())

        into = ScoreGradients(*(None if t is None else torch.zeros_like(t) for t in (source, of_dst, of.mix)))

        def backward() -> None:
            if fused.adjoint(by_source, of, values, outer(), grad_values, into):
                fused.adjoint_of_dst(by_destination, of, values, outer(), into.of_dst)

        return lambda: fused.accumulate(state, by_destination, of, values), backward


def seconds(work: Callable[[], object], runs: int, device: torch.device) -> float:
    """Seconds of one call, the best of `runs`, after one to compile: of the CPU, or on the clock for a GPU."""
    on_gpu = device.type == "cuda"
    clock, taken = time.perf_counter if on_gpu else time.process_time, []
    for _ in range(1 + runs):
        if on_gpu:
            torch.cuda.synchronize(device)
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        taken.append(clock() - start)
    return min(taken[1:])


def copy_bandwidth(source: Tensor, target: Tensor, runs: int) -> float:
    """Bytes read and written per second by a copy between tensors too large for the cache."""
    return 2 * source.numel() * source.itemsize / seconds(lambda: target.copy_(source), runs, source.device)


def measure(case: Case, runs: int) -> Iterator[Measured]:
    """Every kernel; the copy is measured again before each, and counts at its best so far."""
    device = case.x.device
    source = torch.ones(1 << 26, device=device)
    target, bandwidth = torch.zeros_like(source), 0.0
    for name, (work, num_bytes) in case.kernels().items():
        try:
            bandwidth = max(bandwidth, copy_bandwidth(source, target, 3))
            yield Measured(name, seconds(work, runs, device), num_bytes, bandwidth)
        except Exception as error:  # whatever torch or a compiler raises
            yield Measured(name, 0.0, num_bytes, bandwidth, what_failed(error))


def what_failed(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def line(one: Measured) -> str:
    """The record in a line, or what went wrong."""
    if one.problem:
        return f"{one.name:32} {one.problem}"
    bound = one.bytes / one.bandwidth
    return f"{one.name:32} {one.seconds * 1e3:10.3f} {one.bytes / 1e6:12.0f} {bound * 1e3:10.3f} {one.ratio:8.2f}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="numbers in a row of a head")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(args.nodes, args.edges, args.heads, args.width, getattr(torch, args.dtype), args.device)
    config, rows = {**vars(args), "json": None, "device": str(args.device)}, []
    print(f"{'kernel':32} {'ms':>10} {'MB moved':>12} {'bound, ms':>10} {'ratio':>8}")
    for one in measure(case, args.runs):
        print(line(one), flush=True)
        rows.append({**one._asdict(), "ratio": None if one.problem else one.ratio})
        if args.json:  # after each, since the next may end the process
            args.json.write_text(json.dumps({"config": config, "kernels": rows}, indent=1))
    print(f"copies: {max((row['bandwidth'] for row in rows), default=0) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
