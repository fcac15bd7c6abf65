"""Programs inside a model of two layers, run whole and on ranks that stay: what each gives, or how it is refused.

The graph tempts whoever knows rows by their number. It has as many edges as nodes, on every rank too, and ranks own 8,
24, 40, 64, 72 or 136 nodes, where a layer has 8 channels.

A table is a text. A line at its margin is the name of a case, and the lines below are statements of ``forward`` between
the layers. They read and set ``h``; ``n`` is ``h.size(0)``. ``# here`` ends the line that a refusal must name. If they
return something themselves, it is what the model returns. A case of one line may stand behind its name and ``|``, and
``name | module | line`` has the module as ``self.over``. Lines that begin with a word and a colon stand elsewhere:

* ``top:`` in the module, ``made:`` in ``__init__``,
* ``message:`` in the message function of `self.own`, through which ``h`` then goes,
* ``take:`` gives rows of nodes from what the model returned, `out`, and ``adds:`` a term of the loss,
* ``after:`` is what the caller does with `model` and `out` before it calls backward,
* ``says:`` is a pattern that the refusal must contain, ``never:`` one that it must not,
* ``alone:`` says why a case does not run in one model with others.
"""

from __future__ import annotations

import copy
import importlib.util
import linecache
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph

from .staying_ranks import Team

BLOCKS = [40, 24, 8, 64]
NODES = sum(BLOCKS)
WHO = torch.repeat_interleave(torch.tensor(BLOCKS))[torch.randperm(NODES, generator=torch.Generator().manual_seed(1))]
OWNERS = {1: torch.zeros_like(WHO), 3: WHO.clamp(max=2), 4: WHO}
FIELDS = ("x", "w", "ea", "m", "y", "kind")
BOUND = 1e-10
GROUP = 12


def whole_graph(who: Tensor = WHO) -> WholeGraph:
    """As many edges as nodes, and as many into the nodes of a block as it has: loops, hubs, nodes without edges."""
    draw = torch.Generator().manual_seed(0)
    nodes = len(who)
    dst = torch.empty(nodes, dtype=torch.long)
    for block in who.unique():
        of_block = (who == block).nonzero().view(-1)
        dst[of_block] = of_block[torch.randint(max(1, len(of_block) // 2), (len(of_block),), generator=draw)]
    src = torch.randint(nodes, (nodes,), generator=draw)
    src[:3] = dst[:3]
    dst[4] = dst[3] if who[3] == who[4] else dst[4]
    node = {
        "x": 2 * torch.randn(nodes, 6, generator=draw),
        "m": torch.rand(nodes, generator=draw) < 0.4,
        "y": torch.randint(8, (nodes,), generator=draw),
    }
    edge = {
        "w": torch.rand(nodes, generator=draw) + 0.1,
        "ea": torch.randn(nodes, 4, generator=draw),
        "kind": torch.randint(3, (nodes,), generator=draw),
    }
    mixed = torch.randperm(nodes, generator=draw)
    fields = [{name: t.double() if t.is_floating_point() else t for name, t in of.items()} for of in (node, edge)]
    return WholeGraph(nodes, torch.stack([src, dst])[:, mixed], *fields)


GRAPH = whole_graph()

HEAD = """import copy
import fractions
import math
import operator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils

import shardpass as sp


@dataclass
class Out:
    rows: torch.Tensor
    aux: object


class Box:
    pass


{top}

class Model(nn.Module):
    comm = None

    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv(6, 8), gnn.SAGEConv(8, 8)
        self.lin, self.emb, self.scale = nn.Linear(8, 8), nn.Embedding(9, 8), nn.Parameter(torch.rand(8))
{made}

    def replicated(self, term):
        return term if self.comm is None else sp.replicated(term, self.comm)

    def forward(self, x, ei, *fields):
        h = self.between(self.first(x, ei), x, ei, *fields)
        return {result}

    def between(self, h, x, ei, w, ea, m, y, kind):
        n = h.size(0)
{code}
        return h
"""


OWN = """class Own(gnn.MessagePassing):
    def forward(self, x, ei, w, ea):
        return self.propagate(ei, x=x, w=w[:, None], ea=ea)

    def message(self, x_i, x_j, w, ea):""".splitlines()


@dataclass
class Case:
    """A program: its lines by the place where they stand, as the module has it."""

    name: str
    lines: dict[str, list[str]] = field(default_factory=dict)

    def of(self, place: str, otherwise: str = "") -> str:
        return "\n".join(self.lines.get(place, [otherwise]))

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"    {place}: {line}" for place in self.lines for line in self.lines[place])])

    @property
    def returns(self) -> bool:
        """Whether the statements are all of the model after its first layer."""
        return any(line.startswith("return") for line in self.lines.get("code", []))

    @cached_property
    def source(self) -> str:
        lines = {place: list(self.lines.get(place, [])) for place in ("top", "made", "code")}
        if "message" in self.lines:
            lines["top"] += [*OWN, *(" " * 8 + line for line in self.lines["message"])]
            lines["made"].insert(0, "self.own = Own()")
            lines["code"].insert(0, "h = self.own(h, ei, w, ea)")
        if "after" in self.lines:
            lines["top"] += ["def after(model, out):", *("    " + line for line in self.lines["after"])]
        made, code = ("\n".join(" " * 8 + line for line in lines[place]) for place in ("made", "code"))
        result = "h" if self.returns else "self.last(h, ei)"
        return HEAD.format(top="\n".join(lines["top"]), made=made, code=code, result=result)

    @property
    def module_name(self) -> str:
        return "inside_" + re.sub(r"\W+", "_", self.name)

    def load(self, folder: Path) -> ModuleType:
        """The program as a module, from a file of its own, as messages of PyG and errors need one."""
        path = folder / f"{self.module_name}.py"
        path.write_text(self.source)
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location(self.module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module_name] = module  # PyG looks up the classes of messages there
        spec.loader.exec_module(module)
        return module

    def misses(self, error: str) -> str:
        """What is lacking in a refusal: one of the lines marked, and no other line of the program; the advice."""
        here = {i for i, line in enumerate(self.source.split("\n"), 1) if line.endswith("# here")}
        named = {int(line) for line in re.findall(rf"{self.module_name}\.py:(\d+): ", error)}
        if not named or not named <= here:
            return f"names {sorted(named) or 'no line'} and not {sorted(here)}: {error}"
        lacking = [says for says in self.lines.get("says", []) if not re.search(says, error)]
        lacking += [f"no {never}" for never in self.lines.get("never", []) if re.search(never, error)]
        return f"says not {', '.join(lacking)}: {error}" if lacking else ""


def cases(*tables: str) -> dict[str, Case]:
    """The cases of `tables` by name."""
    found: dict[str, Case] = {}
    for line in "\n".join(tables).splitlines():
        if not line.strip():
            continue
        if not line.startswith(" "):
            name, *row = line.split(" | ")
            assert name not in found and len(row) < 3, line
            case = found[name] = Case(name)
            if len(row) == 2:
                case.lines["made"] = [f"self.over = {row[0]}"]
            if not row:
                continue
            line = f"    {row[-1]}  # here"
        word = re.match(r"    (top|made|message|take|adds|after|says|never|alone): ?(.*)", line)
        place, text = word.groups() if word else ("code", line[4:])
        case.lines.setdefault(place, []).append(text)
    return found


@dataclass
class Found:
    """What a run gave: rows and gradients by name, the ids of own nodes and edges, or the error."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    node_ids: Tensor | None = None
    edge_ids: Tensor | None = None
    error: BaseException | None = None


def evaluate(model: nn.Module, case: Case, fields: dict[str, Tensor], edges: Any, rows: Tensor | None) -> Found:
    """The rows that `model` gives, and all gradients. `fields` require gradients; `rows` are the ids of own nodes."""
    for tensor in fields.values():
        tensor.grad = None
    out = called(model, fields, edges)
    if (after := getattr(sys.modules[type(model).__module__], "after", None)) is not None:
        after(model, out)
    given = {"out": out, "model": model, "torch": torch}
    taken = eval(case.of("take", "out"), given)
    weights = torch.randn(NODES, *taken.shape[1:], generator=torch.Generator().manual_seed(7)).to(taken)
    loss = (taken * (weights[: len(taken)] if rows is None else weights[rows])).sum()
    if "adds" in case.lines:
        loss = loss + eval(case.of("adds"), given)
    loss.backward()
    found = {"output": taken.detach()}
    found |= {f"gradient of {name}": gradient(fields[name]) for name in ("x", "w", "ea")}
    found |= {f"gradient of {name}": gradient(p) for name, p in model.named_parameters()}
    return Found(found)


def called(model: nn.Module, fields: dict[str, Tensor], edges: Any) -> Any:
    return model(fields["x"], edges, *(fields[name] for name in FIELDS[1:]))


def gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()


def built(case: Case, folder: Path) -> nn.Module:
    """The model of a case, with parameters that depend on nothing but torch's order of drawing them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.load(folder).Model().double()


def leaves(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """`fields`, those that are features requiring gradients."""
    for name in ("x", "w", "ea"):
        fields[name].requires_grad_()
    return fields


def on_whole(model: nn.Module, case: Case, graph: WholeGraph) -> Found:
    fields = leaves({name: t.clone() for name, t in (graph.node | graph.edge).items()})
    return evaluate(copy.deepcopy(model), case, fields, graph.edge_index, None)


TEAMS = {ranks: Team(GRAPH, owners, ranks) for ranks, owners in OWNERS.items()}


def own_fields(graph: sp.ShardedGraph) -> dict[str, Tensor]:
    """The graph's own tensors, which require gradients."""
    return leaves({k: graph.node[k] for k in ("x", "m", "y")} | {k: graph.edge[k] for k in ("w", "ea", "kind")})


def on_ranks(model: nn.Module, case: Case, team: Team) -> list[Found]:
    def job(comm: sp.Communicator, graph: sp.ShardedGraph) -> Found:
        mine = copy.deepcopy(model)
        mine.comm = comm
        found = evaluate(sp.pyg.wrap(mine, comm), case, own_fields(graph), graph, graph.node_ids)
        return replace(found, node_ids=graph.node_ids, edge_ids=graph.edge_ids)

    return [Found(error=found) if isinstance(found, BaseException) else found for found in team.run(job)]


def put_together(found: list[Found], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of all ranks in the order of the whole graph, and the gradients of parameters that each of them has."""
    of_edges, whole = ("gradient of w", "gradient of ea"), {}
    for name, like in expected.items():
        if name not in ("output", "gradient of x", *of_edges):
            whole[name] = found[-1].tensors[name]
            continue
        whole[name] = torch.full_like(like, float("nan"))
        for one in found:
            whole[name][one.edge_ids if name in of_edges else one.node_ids] = one.tensors[name]
    return whole


def exact_or_why(model: nn.Module, case: Case, teams: dict[int, Team] = TEAMS) -> list[str]:
    """What is wrong with a model that must equal the whole graph, on any number of ranks."""
    wrong = []
    for ranks, team in teams.items():
        expected = on_whole(model, case, team.graph).tensors
        found = on_ranks(model, case, team)
        errors = {f"{type(one.error).__name__}: {one.error}" for one in found if one.error is not None}
        if errors:
            wrong += [f"on {ranks} ranks {error}" for error in sorted(errors)]
            continue
        together = put_together(found, expected)
        off = {name: float((t - together[name]).abs().max()) for name, t in expected.items() if t.numel()}
        off = {name: error for name, error in off.items() if not error <= BOUND}
        wrong += [f"on {ranks} ranks {name} is off by {error:.1e}" for name, error in off.items()]
    return wrong


def refused_or_why(model: nn.Module, case: Case, teams: dict[int, Team] = TEAMS) -> list[str]:
    """What is wrong with a model that every rank must refuse at its line, on any number of ranks."""

    def job(comm: sp.Communicator, graph: sp.ShardedGraph) -> None:
        mine = copy.deepcopy(model)
        mine.comm = comm
        mine = sp.pyg.wrap(mine, comm)
        if "after" not in case.lines:
            called(mine, own_fields(graph), graph)
            return
        evaluate(mine, case, own_fields(graph), graph, graph.node_ids)

    wrong = []
    for ranks, team in teams.items():
        for rank, error in enumerate(team.run(job)):
            where = f"rank {rank} of {ranks}"
            if error is None:
                wrong.append(f"{where} does not refuse it")
            elif not isinstance(error, RefusedError):
                wrong.append(f"{where} raises {type(error).__name__}: {error}")
            elif why := case.misses(str(error)):
                wrong.append(f"{where} {why}")
    return wrong


class Many(nn.Module):
    """The mean of what several programs make of the same rows, between two layers."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last, self.models = models[0].first, models[0].last, nn.ModuleList(models)

    def forward(self, x: Tensor, ei: Any, *fields: Tensor) -> Tensor:
        h = self.first(x, ei)
        return self.last(torch.stack([model.between(h, x, ei, *fields) for model in self.models]).mean(0), ei)


class Together:
    """Exact cases, of which `GROUP` run in one model; one by one only where that finds something wrong."""

    def __init__(self, table: dict[str, Case], folder: Path, teams: dict[int, Team] = TEAMS) -> None:
        self.table, self.folder, self.teams = table, folder, teams
        alone = {"take", "adds", "after", "alone"}
        names = [name for name, case in table.items() if not case.returns and not alone & case.lines.keys()]
        self._groups = [names[i : i + GROUP] for i in range(0, len(names), GROUP)]
        self._is_exact: dict[int, bool] = {}

    def wrong(self, name: str) -> list[str]:
        """What is wrong with a case."""
        for i, group in enumerate(self._groups):
            if name in group:
                if i not in self._is_exact:
                    many = Many([built(self.table[one], self.folder) for one in group])
                    self._is_exact[i] = not exact_or_why(many, Case("many"), self.teams)
                if self._is_exact[i]:
                    return []
        return exact_or_why(built(self.table[name], self.folder), self.table[name], self.teams)
