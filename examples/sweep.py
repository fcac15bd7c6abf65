"""A sweep of hydra with a log of TensorBoard for each setting, offline: pip install hydra-core tensorboard

    python examples/sweep.py --multirun lr=0.001,0.01,0.1
    torchrun --nproc-per-node 2 examples/sweep.py --multirun lr=0.001,0.01,0.1
    tensorboard --logdir sweep

Each rank runs hydra itself: its basic sweeper goes through the settings in the same order everywhere.
"""

import os

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch.utils.tensorboard import SummaryWriter
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.cli.graphs import digits

CONFIG = {
    "lr": 0.01,
    "hidden": 16,
    "epochs": 20,
    "defaults": ["_self_", {"override hydra/job_logging": "none"}],  # else ranks write into one file
    "hydra": {"sweep": {"dir": "sweep"}, "run": {"dir": "sweep/one"}},  # hydra's own names are times, which differ
}


@torch.no_grad()
def evaluate(model, data, comm):
    return sp.accuracy(model(data.x, data.edge_index), data.y, data.val_mask, comm)


def train(config, data, comm, folder):
    with sp.seed(0, comm):
        model = GraphSAGE(data.num_features, config.hidden, num_layers=2, out_channels=data.num_classes)
    model = sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    log = SummaryWriter(folder) if comm.rank == 0 else None
    for epoch in range(config.epochs):
        loss = sp.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val = evaluate(model, data, comm)  # on every rank, since it is collective
        if log is not None:
            log.add_scalar("loss", loss.item(), epoch)
            log.add_scalar("val", val, epoch)
    if log is not None:
        log.close()
        print(f"lr {config.lr}: accuracy {val:.4f} on {comm.size} rank(s), log in {folder}", flush=True)
    return val


def main():
    comm = sp.connect()  # once, for all settings
    if comm.rank == 0 and not os.path.exists("recipe-parts"):
        sp.partition(digits(), "recipe-parts", parts=4)
    comm.barrier()
    data = sp.load("recipe-parts", comm)
    ConfigStore.instance().store("config", CONFIG)

    @hydra.main(version_base="1.3", config_path=None, config_name="config")
    def job(config):
        return train(config, data, comm, hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)

    job()


if __name__ == "__main__":
    main()
