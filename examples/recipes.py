"""All recipes of docs/recipes.md in one script. It goes on where it stood when it is started again.

python examples/recipes.py 3     # epochs
python examples/recipes.py 30
torchrun --nproc-per-node 4 examples/recipes.py 60
"""

import csv
import os
import sys

import torch
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.cli.graphs import digits

comm, epochs, patience = sp.connect(), int(sys.argv[1]), 5
if comm.rank == 0 and not os.path.exists("recipe-parts"):
    sp.partition(digits(), "recipe-parts", parts=4)
comm.barrier()
data = sp.load("recipe-parts", comm)
with sp.seed(0, comm):
    model = GraphSAGE(data.num_features, 16, num_layers=2, out_channels=data.num_classes)
model = sp.pyg.wrap(model, comm)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=3)


def step(model):
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(data.x, data.edge_index)
    loss = sp.cross_entropy(out.float(), data.y, data.train_mask, comm)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model):
    model.eval()
    return sp.accuracy(model(data.x, data.edge_index), data.y, data.val_mask, comm)


best, waited = 0.0, 0
first = 0
if comm.all_gather_object(os.path.exists("run.ckpt"))[0]:
    found = sp.load_checkpoint("run.ckpt", comm, model, optimizer, graph=data)
    scheduler.load_state_dict(found["extra"]["scheduler"])
    best, waited = found["extra"]["best"]
    first = found["epoch"]
log = open("log.csv", "a", newline="") if comm.rank == 0 else None  # noqa: SIM115
for epoch in range(first, epochs):
    loss = step(model)
    val = evaluate(model)
    scheduler.step(val)
    if log is not None:
        csv.writer(log).writerow([epoch, loss, val])
    if val > best:
        best, waited = val, 0
        sp.save_checkpoint("best.ckpt", comm, model, epoch=epoch, graph=data)
    else:
        waited += 1
    extra = {"scheduler": scheduler.state_dict(), "best": [best, waited]}
    sp.save_checkpoint("run.ckpt", comm, model, optimizer, epoch=epoch + 1, graph=data, extra=extra)
    if waited >= patience:
        break
sp.load_checkpoint("best.ckpt", comm, model, graph=data)
restored = evaluate(model)
if log is not None:
    log.close()
    print(f"from epoch {first}: best accuracy {best:.4f}, restored {restored:.4f}")
