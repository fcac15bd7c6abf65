"""Random models of the kind that people write: layers, and statements around them, some of which mix rows of nodes.

A program is the source of a model of PyG or DGL, drawn by a seed. A `Library` has layers, statements that a sharded
graph must compute exactly, and statements that mix rows, which it must refuse. A ``#`` in a statement stands for a
number that tells its modules from others.
"""

from __future__ import annotations

import importlib.util
import linecache
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from shardpass.testing import WholeGraph, awkward_graph

from .program_lines import (
    DGL_EDGES,
    DGL_LAYERS,
    DGL_LINES,
    DGL_MIXING,
    MIXED_ROWS,
    PYG_EDGES,
    PYG_LAYERS,
    PYG_LINES,
    PYG_MIXING,
    ROWS,
    Line,
)


def graph() -> WholeGraph:
    """A small graph with the fields that the programs read."""
    whole = awkward_graph(channels=5, edge_channels=3)
    generator = torch.Generator().manual_seed(3)
    whole.node["m"] = torch.rand(whole.num_nodes, generator=generator) < 0.4
    whole.node["y"] = torch.randint(0, 4, (whole.num_nodes,), generator=generator)
    whole.edge["kind"] = torch.randint(0, 3, (whole.edge_index.size(1),), generator=generator)
    return whole


HEAD = """import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
{imports}
NODES, EDGES = {nodes}, {edges}


class Centred(nn.Module):
    def forward(self, h):
        return h - h.mean(0)

{classes}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
{made}

    def encode(self, h, {arguments}):
{encode}
        return h

    def forward(self, {arguments}):
        h = self.first(x)
        h = self.encode(h, {arguments})
{forward}
        return self.last(h)
"""


@dataclass(frozen=True)
class Library:
    """What programs of PyG or of DGL are made of."""

    imports: str
    classes: str
    arguments: str
    layers: list[Line]
    lines: list[Line]
    edges: list[Line]
    mixing: list[Line]


PYG = Library(
    """import torch_geometric.nn as gnn
from torch_geometric.nn import global_max_pool, global_mean_pool
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax
""",
    """
class Hooked(gnn.GCNConv):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_forward_hook(lambda module, given, h: h - h.mean(0))


class Weighted(gnn.aggr.Aggregation):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        alpha = softmax(self.gate(x), index, ptr, dim_size, dim)
        return self.reduce(alpha * x, index, ptr, dim_size, dim)


class Own(gnn.MessagePassing):
    def __init__(self, of):
        super().__init__(aggr="mean")
        self.of, self.out = of, nn.Linear(16, 8)

    def forward(self, h, ei, ea=None):
        return self.out(self.propagate(ei, h=h, ea=ea))

    def message(self, h_i, h_j, ea):
        return self.of(h_i, h_j, ea)

""",
    "x, ei, w, ea, kind, m, y, batch",
    PYG_LAYERS,
    ROWS + PYG_LINES,
    PYG_EDGES,
    MIXED_ROWS + PYG_MIXING,
)
DGL = Library(
    """import dgl.function as fn
import dgl.nn.pytorch as dnn
from dgl.nn.functional import edge_softmax
""",
    "",
    "g, x, w, ea, kind, m, y",
    DGL_LAYERS,
    ROWS + DGL_LINES,
    DGL_EDGES,
    MIXED_ROWS + DGL_MIXING,
)


@dataclass
class RandomProgram:
    """A model's source.

    mixes: whether one of its statements must be refused.
    lines: the lines that a refusal may name. parameters: the names that it may give in their place.
    """

    source: str
    mixes: bool
    lines: set[int]
    parameters: list[str]

    def names(self, lines: set[int], error: str) -> bool:
        """Whether a refusal that names `lines` says what mixes rows: its line, or the parameter."""
        return lines <= self.lines if lines else any(f"'{name}" in error for name in self.parameters)

    def load(self, folder: Path, name: str) -> ModuleType:
        """The program as a module, from a file of its own, as messages of PyG and errors need one."""
        path = folder / f"{name}.py"
        path.write_text(self.source)
        linecache.checkcache()
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # PyG looks up the classes of messages there
        spec.loader.exec_module(module)
        return module


def draw(seed: int, whole: WholeGraph, library: Library) -> RandomProgram:
    """The program of a seed: two or three layers, two to five statements, in half of the programs one that mixes.

    Args:
        whole: parameters with an entry for each node or edge have as many as this graph.
    """
    rng = random.Random(seed)
    chosen = [*rng.sample(library.layers, rng.randint(2, 3)), *rng.sample(library.lines, rng.randint(2, 5))]
    chosen += rng.sample(library.edges, rng.randint(0, 1))
    rng.shuffle(chosen)
    mixing = rng.choice(library.mixing) if rng.random() < 0.5 else None
    if mixing is not None:
        chosen.insert(rng.randrange(len(chosen) + 1), mixing)
    return compose(chosen, mixing, rng.randrange(len(chosen) + 1), whole, library)


def compose(chosen: list[Line], mixing: Line | None, at: int, whole: WholeGraph, library: Library) -> RandomProgram:
    """The program of the lines `chosen`, of which `mixing` mixes rows, and those before `at` stand in ``encode``."""
    made = ["        " + (line.made or "pass").replace("#", str(number)) for number, line in enumerate(chosen)]
    body = ["        " + line.code.replace("#", str(number)) for number, line in enumerate(chosen)]
    source = HEAD.format(
        imports=library.imports,
        classes=library.classes,
        arguments=library.arguments,
        nodes=whole.num_nodes,
        edges=whole.edge_index.size(1),
        made="\n".join(made),
        encode="\n".join(body[:at] or ["        pass"]),
        forward="\n".join(body[at:]),
    )
    of_mixing = [text for line, text in zip(chosen, made) if line is mixing]
    parameters = [name for text in of_mixing for name in re.findall(r"self\.(\w+)", text)]
    return RandomProgram(source, mixing is not None, _lines_of(source, mixing), parameters)


def _lines_of(source: str, mixing: Line | None) -> set[int]:
    """The numbers of the lines of a mixing statement, and of what it calls."""
    if mixing is None:
        return set()
    parts = [part.strip().split("#")[0] for part in (mixing.code + "\n" + mixing.made).split("\n") if part.strip()]
    parts += ["return h - h.mean(0)"] if "Centred" in mixing.made else []
    parts += ["self.register_forward_hook"] if "Hooked" in mixing.made else []
    return {i for i, text in enumerate(source.split("\n"), 1) if any(text.strip().startswith(part) for part in parts)}
