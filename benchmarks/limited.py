"""Ten epochs in a process with a bound on its memory: the child that `benchmarks.out_of_core` starts.

    python -m benchmarks.limited '{"system": "offload", "folder": ..., "budget": 200000000, ...}'

Prints one JSON line: losses and figures, or ``failed`` with what was raised.

[Note: what is bounded and measured]
RLIMIT_DATA bounds the writable private mappings of a process (VmData in /proc/self/status): heap, large tensors, thread
stacks. Mapped features are such a mapping too, since a tensor may be written to, but they take memory only where they
are written. So the bound is VmData once all libraries are imported, plus the size of the mapped file, plus the budget;
`written_bytes` tells how much of the mapping became memory of the process (0 is expected). The graph is loaded under
the bound. The peak is the highest resident anonymous memory (RssAnon) above that after the imports. A thread looks
every few milliseconds, so it may be a little low. glibc gives freed blocks back at once (MALLOC_MMAP_THRESHOLD_), and
MKL, where torch has it, does not keep 8 MiB for every thread that multiplied (MKL_DISABLE_FAST_MM). Both cost time, the
same for all.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import models

import shardpass as sp

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_DISABLE_FAST_MM": "1",
}
SYSTEMS = ("pyg", "memory", "mapped", "offload")
MIN_BYTES = 1 << 16
_STACK_BYTES = 1 << 20


def status(field: str) -> int:
    """Bytes: VmData or RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Peak:
    """The highest RssAnon above that at the start; a thread looks."""

    def __init__(self, seconds: float = 0.003) -> None:
        self.start, self.bytes, self._seconds = status("RssAnon"), 0, seconds
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, status("RssAnon") - self.start)
            time.sleep(self._seconds)


def written_bytes(folder: Path) -> int:
    """How much of the files mapped from `folder` is memory of this process by now."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = line.rstrip().find(str(folder)) > 0
        elif inside and words[0] == "Anonymous:":
            found += int(words[1]) * 1024
    return found


def build_model(config: dict[str, Any]) -> nn.Module:
    """A GCN with BatchNorm, in float64."""
    sizes = (config["features"], config["hidden"], config["layers"], config["classes"])
    model: nn.Module = models.GCN(*sizes, norm="batch_norm").double()
    return model


def train(
    model: nn.Module,
    forward: Callable[[], Tensor],
    epochs: int,
    saved: Callable[[], AbstractContextManager[None]] = nullcontext,
    sync: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Losses, and the median seconds of an epoch; `sync` sums gradients over ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, wall, cpu = [], [], []
    for _ in range(epochs):
        began, began_cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        with saved():
            loss = forward()
        loss.backward()
        sync()
        optimizer.step()
        losses.append(float(loss.detach()))
        del loss
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    return {"losses": losses, "wall_seconds": float(np.median(wall)), "cpu_seconds": float(np.median(cpu))}


def run_pyg(config: dict[str, Any]) -> dict[str, Any]:
    """Plain PyG, all in memory."""
    folder = Path(config["folder"])
    x, y, mask = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("x", "y", "train_mask"))
    edge_index = torch.from_numpy(np.load(folder / "edge_index.npy")).long()
    torch.manual_seed(0)
    model = build_model(config)
    forward = lambda: F.cross_entropy(model(x, edge_index)[mask], y[mask])  # noqa: E731
    return train(model, forward, config["epochs"])


def run_rank(comm: sp.Communicator, config: dict[str, Any]) -> dict[str, Any]:
    """Ours, one rank: features in memory or mapped, saved tensors in memory or on disk."""
    folder = Path(config["folder"])
    graph = sp.load(folder / "store", comm)
    x = graph.x.clone() if config["system"] == "memory" else graph.x
    with sp.seed(0, comm):
        model = build_model(config)
    sp.pyg.wrap(model, comm)
    forward = lambda: sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, comm)  # noqa: E731
    saved: Callable[[], AbstractContextManager[None]] = nullcontext
    if config["system"] == "offload":
        saved = lambda: sp.offload(folder / "scratch", min_bytes=MIN_BYTES, read_ahead=1)  # noqa: E731
    return train(model, forward, config["epochs"], saved, lambda: sp.sync_gradients(model, comm))


def run(config: dict[str, Any]) -> dict[str, Any]:
    """One system."""
    if config["system"] == "pyg":
        return run_pyg(config)
    return run_rank(sp.connect(), config)


def main(config: dict[str, Any]) -> None:
    """Bound the process, run, print."""
    torch.set_num_threads(1)
    threading.stack_size(_STACK_BYTES)
    for name in ("shardpass.core.kernels.numba_loops", "shardpass.frontends.pyg"):
        import_module(name)
    F.linear(torch.randn(64, 64).double().requires_grad_(), torch.randn(8, 64).double()).sum().backward()
    folder = Path(config["folder"])
    peak = Peak()
    budget = config.get("budget")
    if budget is not None:
        store = folder / "store"
        mapped = 0 if config["system"] == "pyg" else sum(file.stat().st_size for file in store.iterdir())
        bound = status("VmData") + mapped + budget
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    try:
        found = run(config)
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and "allocate memory" not in text and "new thread" not in text:
            raise
        found = {"failed": text.splitlines()[0] if text else "MemoryError"}
    print(json.dumps({**found, "peak_bytes": peak.bytes, "written_bytes": written_bytes(folder)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
