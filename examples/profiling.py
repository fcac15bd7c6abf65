"""One trace of all ranks, each a process of it, for https://ui.perfetto.dev

    python examples/profiling.py trace.json
    torchrun --nproc-per-node 2 examples/profiling.py trace.json

Clocks of several hosts differ: compare the ranks of one host. A trace is large, so profile few steps.
"""

import json
import os
import sys

import torch
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.graphs import digits

comm = sp.connect()
if comm.rank == 0 and not os.path.exists("recipe-parts"):
    sp.partition(digits(), "recipe-parts", parts=4)
comm.barrier()
data = sp.load("recipe-parts", comm)
with sp.seed(0, comm):
    model = GAT(data.num_features, 16, num_layers=2, out_channels=data.num_classes)
model = sp.pyg.wrap(model, comm)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def step():
    with torch.profiler.record_function("forward"):
        loss = sp.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask, comm)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def merged(traces):
    """The events of all ranks. A rank's threads, and streams of its GPU, become one process with its name."""
    for rank, events in enumerate(traces):
        own = {"pid": rank + 1}  # 0 is the idle process of an operating system
        yield {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}} | own
        yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank}} | own
        for event in events:
            if isinstance(event.get("pid"), int) and not event["name"].startswith("process_"):
                yield event | own | ({"id": f"{rank}/{event['id']}"} if "id" in event else {})  # arrows within a rank


step()  # the first steps prepare
step()
with torch.profiler.profile() as profiler:
    step()
profiler.export_chrome_trace(f"{sys.argv[1]}.{comm.rank}")
with open(f"{sys.argv[1]}.{comm.rank}") as file:
    traces = comm.all_gather_object(json.load(file)["traceEvents"])
os.remove(f"{sys.argv[1]}.{comm.rank}")
if comm.rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"traceEvents": list(merged(traces)), "displayTimeUnit": "ms"}, file)
    print(f"the step of {comm.size} rank(s) is in {sys.argv[1]}")
