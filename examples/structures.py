"""Inference on structures of different sizes: each has a graph of its own, and memory stays as it is.

    python examples/structures.py
    python examples/structures.py 10000
    torchrun --nproc-per-node 2 examples/structures.py

The edges of a structure are its pairs of atoms that are close to one another, as libraries of atoms list them.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import nn
from torch_geometric.nn import GINEConv

import shardpass as sp


class Energies(nn.Module):
    """The energy of each atom."""

    def __init__(self, width=16):
        super().__init__()
        self.atoms, self.out = nn.Embedding(10, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(GINEConv(nn.Linear(width, width), edge_dim=1) for _ in range(2))

    def forward(self, kinds, edge_index, distance):
        h = self.atoms(kinds)
        for layer in self.layers:
            h = h + layer(h, edge_index, distance.unsqueeze(-1)).tanh()
        return self.out(h).squeeze(-1)


def structure(number):
    """30 to 120 atoms in a box, with the pairs that are at most 1.5 apart, in both directions."""
    draws = np.random.default_rng(number)
    atoms = int(draws.integers(30, 121))
    places = draws.random((atoms, 3)) * atoms ** (1 / 3)
    i, j = cKDTree(places).query_pairs(1.5, output_type="ndarray").T
    distance = np.linalg.norm(places[i] - places[j], axis=1)
    edges = np.concatenate([i, j]), np.concatenate([j, i])
    return {"edge_index": edges, "edge_length": np.tile(distance, 2), "kind": draws.integers(0, 10, atoms)}


def resident():
    """MiB that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    comm = sp.connect()
    with sp.seed(0, comm):
        model = Energies().double()
    model = sp.pyg.wrap(model.eval(), comm)
    energies, held = [], []
    for number in range(count):
        graph = sp.shard(structure(number), comm)
        with torch.no_grad():
            energies.append(sp.sum(model(graph.kind, graph, graph.edge_length), None, comm).item())
        held.append(resident())
    if comm.rank == 0:
        print(f"{count} structures, mean energy {np.mean(energies):.6f}, on {comm.size} rank(s)")
        print(f"memory at the end: {held[-1] / held[count // 10]:.3f} of that after a tenth of them")


if __name__ == "__main__":
    main()
