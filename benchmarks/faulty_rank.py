"""A run in which one rank fails, for `benchmarks.faults`: ``python -m benchmarks.faulty_rank FOLDER HOW PHASE FAULT``.

FOLDER holds the store and takes what the run writes: ``rank0.log``, the checkpoint, the output of the inference, and
``fault``, the time of the fault and the process it hit.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn.models import GCN

import shardpass as sp

RANKS = 3
PHASES = ("load", "first forward", "forward", "backward", "gradient sum", "save", "infer", "loaders")
GUILTY = {phase: 0 if phase in ("save", "gradient sum") else 1 for phase in PHASES}


class Fault:
    """What goes wrong on one rank, once."""

    def __init__(self, folder: Path, phase: str, fault: str, comm: Any) -> None:
        self.folder, self.phase, self.fault, self.comm = folder, phase, fault, comm

    def at(self, phase: str, when: bool = True) -> Callable[..., None]:
        """A hook that does it, if this is the phase; else one that does nothing."""
        is_here = when and phase == self.phase and self.comm.rank == GUILTY[phase]
        return lambda *_: self.happen() if is_here else None

    def happen(self) -> None:
        note = self.folder / "fault"
        if note.exists():
            return
        (self.folder / "fault.new").write_text(f"{time.time()} {os.getpid()}")
        (self.folder / "fault.new").rename(note)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "exit":
            sys.exit(3)
        elif self.fault == "abort":
            self.comm.abort("the loss is nan")
        elif self.fault == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(2.0)  # the others look for it every half second, and may be done by then
        elif self.fault == "raise":
            raise ValueError("boo")
        elif self.fault == "link":  # whoever started this takes the link down
            while not (self.folder / "go").exists():
                time.sleep(0.05)


def work(comm: Any, folder: Path, phase: str, fault: str) -> None:
    """Load, train, save, infer and sample."""
    torch.set_num_threads(1)
    fails = Fault(folder, phase, fault, comm)
    fails.at("load")()
    graph = sp.load(folder / "store", comm)
    with comm.random_lock():
        torch.manual_seed(0)
        plain = GCN(graph.num_features, 8, 2, graph.num_classes)
    model = sp.pyg.wrap(plain, comm, check=False)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        hooks = [
            plain.convs[1].register_forward_pre_hook(fails.at("forward" if epoch else "first forward")),
            plain.convs[0].register_forward_hook(
                lambda _, __, out, epoch=epoch: out.register_hook(fails.at("backward", epoch == 1)) and None
            ),
        ]
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        fails.at("gradient sum", epoch == 1)()
        optimizer.step()
        fails.at("save", epoch == 1)()
        sp.save_checkpoint(folder / "checkpoint", comm, model, optimizer, epoch=epoch, graph=graph)
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        hook = plain.convs[1].register_forward_pre_hook(fails.at("infer"))
        sp.infer(model, graph, folder / "logits.npy", overwrite=True)
        hook.remove()
    with comm.random_lock():
        torch.manual_seed(1)
        sampled = GCN(graph.num_features, 8, 2, graph.num_classes)
    for number, batch in enumerate(sp.pyg.NeighborLoader(graph, [2, 2], graph.train_mask, batch_size=2)):
        sampled.zero_grad()
        out = sampled(batch.x, batch.edge_index)[: batch.batch_size]
        fails.at("loaders", number == 1)()
        sp.cross_entropy(out, batch.y[: batch.batch_size], None, comm).backward()
        sp.sync_gradients(sampled, comm)
    comm.barrier("the end")


def as_process(folder: Path, phase: str, fault: str) -> None:
    """One rank, with all that it says in a file of its own."""
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work(sp.connect(), folder, phase, fault)
    print("is done", flush=True)


def as_thread(comm: Any, folder: Path, phase: str, fault: str) -> None:
    """The same for a rank that is a thread."""
    words = "is done"
    try:
        work(comm, folder, phase, fault)
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        raise
    finally:
        (folder / f"rank{comm.rank}.log").write_text(words + "\n")


def as_fork(rank: int, *arguments: Any) -> None:
    """The same for a process that `main` forks, in a network namespace of its own if there are some."""
    os.environ["RANK"] = str(rank)
    if "NAMESPACES" in os.environ:
        holder = os.environ["NAMESPACES"].split()[rank]
        with open(f"/proc/{holder}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"rank {rank} cannot enter the network namespace of {holder}")
    as_process(*arguments)


def main(folder: Path, how: str, *what: str) -> None:
    """Start the ranks, or be one."""
    if how == "threads":
        sp.spawn(as_thread, RANKS, args=(folder, *what))
    elif how in ("fork", "namespaces"):
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=as_fork, args=(rank, folder, *what)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in ranks))
    else:
        as_process(folder, *what)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
