"""Graphs, partitions and processes for the tests of SAR's names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from backends.launchers import free_port
from torch import Tensor

TESTS = Path(__file__).parent.parent

NODES, EDGES = 60, 420
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")

# ---- graphs


def homogeneous(self_loops: bool = True) -> Any:
    torch.manual_seed(0)
    src, dst = torch.randint(NODES - 5, (2, EDGES))
    g = dgl.graph((src, dst), num_nodes=NODES)
    g = dgl.add_self_loop(g) if self_loops else g
    g.ndata["feat"] = torch.randn(NODES, 8, dtype=torch.float64)
    g.ndata["xfeat"] = torch.arange(NODES)
    g.ndata["label"] = torch.randint(3, (NODES,))
    g.ndata["train_mask"] = torch.arange(NODES) % 3 == 0
    g.ndata["test_mask"] = torch.arange(NODES) % 3 == 1
    g.ndata["orig_id"] = torch.arange(NODES)
    g.edata["w"] = torch.rand(g.num_edges(), dtype=torch.float64)
    g.edata["orig_id"] = torch.arange(g.num_edges())
    return g


def heterogeneous() -> Any:
    torch.manual_seed(1)
    sizes = {"user": 30, "item": 24}
    kinds = [("user", "buys", "item"), ("item", "sold to", "user"), ("user", "knows", "user")]
    g = dgl.heterograph(
        {k: (torch.randint(sizes[k[0]], (90,)), torch.randint(sizes[k[2]], (90,))) for k in kinds}, sizes
    )
    for kind in g.ntypes:
        g.nodes[kind].data["feat"] = torch.randn(sizes[kind], 8, dtype=torch.float64)
        g.nodes[kind].data["orig_id"] = torch.arange(sizes[kind])
    g.nodes["user"].data["only"] = torch.rand(30, 2)
    for kind in g.canonical_etypes:
        g.edges[kind].data["w"] = torch.rand(90)
        g.edges[kind].data["orig_id"] = torch.arange(90)
    return g


def alphabetical() -> Any:
    """The heterogeneous graph with its types in the order in which DGL's partitions have them."""
    g = heterogeneous()
    kinds = sorted(g.canonical_etypes)
    nodes = sorted(g.ntypes)
    ordered = dgl.heterograph({k: g.edges(etype=k) for k in kinds}, {k: g.num_nodes(k) for k in nodes})
    for kind in kinds:
        ordered.edges[kind].data["w"] = g.edges[kind].data["w"]
    for kind in nodes:
        ordered.nodes[kind].data["feat"] = g.nodes[kind].data["feat"]
    return ordered


def write(directory: Path, parts: int) -> Path:
    for name, graph in (("homo", homogeneous()), ("bare", homogeneous(False)), ("het", heterogeneous())):
        dgl.distributed.partition_graph(graph, name, parts, str(directory / name), part_method="random")
    return directory


def start(
    directory: Path, out: Path, ranks: int, cases: list[str], limit: float = 480.0, **env: str
) -> tuple[list[Any], str]:
    """What the cases gave on each rank (None: it failed), and all that was printed."""
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"} | env
    environ["PYTHONPATH"] = f"{TESTS.parent}{os.pathsep}{TESTS}"
    program = [sys.executable, "-m", "frontends.sar_program"]
    arguments = [str(ranks), str(free_port()), str(directory), str(out), *cases]
    children = [
        subprocess.Popen(
            [*program, str(rank), *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    texts = []
    for child in children:
        try:
            texts.append(child.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            for other in children:
                other.kill()
            pytest.fail(f"it hangs: {child.communicate()[0]}")
    return read_results(out, ranks), "\n".join(texts)


def read_results(out: Path, ranks: int) -> list[Any]:
    """What the cases gave on each rank (None: it failed)."""
    files = [Path(f"{out}.{rank}") for rank in range(ranks)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def of(results: list[Any], case: str) -> list[Any]:
    return [found[case] for found in results]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), float((found - expected).abs().max())


def whole(parts: list[Tensor], ids: list[Tensor]) -> Tensor:
    """Rows of all ranks by original id."""
    return torch.cat(parts)[torch.cat(ids).argsort()]


def same_gradients(found: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Backward visits every call, so what the loss does not use has zeros instead of None."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() <= found.keys()
    assert not any(found[name].any() for name in found.keys() - expected.keys())
    for name, gradient in expected.items():
        close(found[name], gradient)
