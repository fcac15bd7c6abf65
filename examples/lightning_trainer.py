"""Train a wrapped model by Lightning's Trainer, with validation, early stopping and resume: pip install lightning

    python examples/lightning_trainer.py 3      # epochs
    python examples/lightning_trainer.py 100    # goes on from epoch 3
    mpirun -n 4 python examples/lightning_trainer.py 100

Each rank runs a Trainer of its own with one device. Lightning knows of no other rank: shardpass connects them.
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.graphs import digits


class Digits(lightning.LightningModule):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.comm = graph, graph.comm
        with sp.seed(0, self.comm):
            model = GAT(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes, heads=8)
        self.model = sp.pyg.wrap(model, self.comm)

    def training_step(self, batch):
        logits = self.model(self.graph.x, self.graph)
        return sp.cross_entropy(logits, self.graph.y, self.graph.train_mask, self.comm)

    def validation_step(self, batch):
        logits = self.model(self.graph.x, self.graph)
        self.log("val", sp.accuracy(logits, self.graph.y, self.graph.val_mask, self.comm))  # that of all ranks

    def test_step(self, batch):
        logits = self.model(self.graph.x, self.graph)
        self.log("accuracy", sp.accuracy(logits, self.graph.y, self.graph.test_mask, self.comm))

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


def main():
    torch.set_num_threads(1)
    comm = sp.connect()
    if comm.rank == 0 and not os.path.exists("lightning-parts"):
        sp.partition(digits(), "lightning-parts", parts=4)
    comm.barrier()
    module = Digits(sp.load("lightning-parts", comm))
    step = torch.utils.data.DataLoader([0])  # an epoch is one step on the whole graph
    stopping = EarlyStopping("val", mode="max", patience=10)  # all ranks know the same numbers, and stop together
    keeping = ModelCheckpoint("lightning-ckpt", "best", "val", mode="max", save_last=True)  # rank 0 writes the files
    trainer = lightning.Trainer(
        max_epochs=int(sys.argv[1]), accelerator="cpu", devices=1, plugins=[LightningEnvironment()],  # this rank alone
        callbacks=[stopping, keeping][: 2 if comm.rank == 0 else 1], num_sanity_val_steps=0,
        logger=False, enable_checkpointing=comm.rank == 0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    last = "lightning-ckpt/last.ckpt"
    trainer.fit(module, step, step, ckpt_path=last if comm.all_gather_object(os.path.exists(last))[0] else None)
    best = comm.all_gather_object(keeping.best_model_path)[0]  # other ranks have none
    (found,) = trainer.test(module, step, ckpt_path=best, verbose=False)
    if comm.rank == 0:
        print(f"epoch {trainer.current_epoch}: test accuracy {found['accuracy']:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
