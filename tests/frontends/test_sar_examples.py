"""The examples of SAR's documentation, by every launcher, with late ranks, against plain DGL in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

dgl = pytest.importorskip("dgl")

from backends.launchers import why_no_mpi  # noqa: E402

from benchmarks.jobs import mpirun_command  # noqa: E402
from frontends.sar_cases import LAUNCHER_VARIABLES, TESTS, free_port, read_results  # noqa: E402
from frontends.sar_examples import advanced, data, models, sign  # noqa: E402
from frontends.sar_examples.start import EXAMPLES  # noqa: E402

pytestmark = pytest.mark.processes

LAUNCHERS = ("torchrun", "fork", "mpirun", "mpirun with gloo")
QUICK = {("basic", "mpirun", 2)}
CASES = [
    pytest.param(example, launcher, ranks, marks=() if (example, launcher, ranks) in QUICK else pytest.mark.long)
    for launcher in LAUNCHERS
    for ranks in (2, 4)
    for example in EXAMPLES
]


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    made: dict[int, Path] = {}

    def of(parts: int) -> Path:
        if parts not in made:
            made[parts] = tmp_path_factory.mktemp(f"examples{parts}")
            data.write(made[parts], parts)
        return made[parts]

    return of


@pytest.mark.long
@pytest.mark.parametrize("example, launcher, ranks", CASES)
def test_examples(example: str, launcher: str, ranks: int, partitions: Callable[[int], Path], tmp_path: Path) -> None:
    if launcher.startswith("mpirun") and why_no_mpi():
        pytest.skip(why_no_mpi())
    name = "mag" if example.startswith("rgcn") else "arxiv"
    late = ranks - 1 if ranks == 2 else 0
    arguments = [
        example, "--partitioning-json-file", str(partitions(ranks) / name / f"{name}.json"), "--ip-file",
        str(tmp_path / "ip"), "--out", str(tmp_path / "out"), "--world-size", str(ranks), "--late", str(late),
        "--port", str(free_port()), "--backend", "mpi" if launcher == "mpirun" else "gloo",
    ]  # fmt: skip
    text = started(launcher, ranks, arguments)
    found = read_results(tmp_path / "out", ranks)
    assert None not in found, text
    assert "died" not in text and "shardpass: rank" not in text, text
    assert not (tmp_path / "ip").exists()
    check(example, found)


def started(launcher: str, ranks: int, arguments: list[str]) -> str:
    """All that was printed, when every process has ended."""
    program = [sys.executable, "-m", "frontends.sar_examples.start"]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "--master-port", str(free_port()), *program[1:], *arguments]
    elif launcher == "fork":
        command = [*program, "--fork", *arguments]
    else:
        command = [*mpirun_command(ranks), *program, *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1", "SAR_SOCKET_NAME": "lo"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


# ---- plain DGL in one process


def check(example: str, every: list[Any]) -> None:
    """Whether an example gave what plain DGL gives on the whole graph."""
    with doubles():
        if example == "sampling":
            return check_sampling(every)
        expected = advanced_losses() if example == "advanced" else losses_of(example.removesuffix("_mfg"))
    for found in every:
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name


class doubles:
    """A block in which new tensors are float64, as in the examples, and random numbers are those of the examples."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float32)


def steps(model: nn.Module, optimizer: Any, outputs: Callable[[], Any], labels: Any, count: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for _ in range(count):
        loss = F.cross_entropy(outputs(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def losses_of(example: str) -> dict[str, Any]:
    """What ``basic``, ``sign`` and ``rgcn`` give."""
    if example == "rgcn":
        g = data.mag()
        torch.manual_seed(0)
        model: nn.Module = models.RelationalModel(g.etypes)
        features = {kind: g.nodes[kind].data["features"] for kind in g.ntypes}
        mask, labels = (g.nodes["paper"].data[name] for name in ("train_mask", "labels"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return {"losses": steps(model, optimizer, lambda: model(g, features)["paper"][mask], labels[mask], 4)}
    g = data.arxiv()
    torch.manual_seed(0)
    x, labels, mask, test = (g.ndata[name] for name in ("features", "labels", "train_mask", "test_mask"))
    if example == "sign":
        rows, model = sign.averaged(g, x), sign.mlp(x.size(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return {"losses": steps(model, optimizer, lambda: model(rows[mask]), labels[mask], 5)}
    model = models.GNNModel("sage", nn.BatchNorm1d)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = steps(model, optimizer, lambda: model(g, x)[mask], labels[mask], 5)
    model.eval()
    return {"losses": losses, "correct": int((model(g, x)[test].argmax(1) == labels[test]).sum())}


@cache
def advanced_losses() -> dict[Any, list[float]]:
    """What ``advanced`` gives: the same in every mode."""
    g, found = data.arxiv(), {}
    mask, labels = g.ndata["train_mask"], g.ndata["labels"]
    for layer in models.LAYERS:
        torch.manual_seed(1)
        model = models.GNNModel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = steps(model, optimizer, lambda m=model: m(g, g.ndata["features"])[mask], labels[mask], 3)
        found |= {(layer, mode, graph): losses for mode in advanced.MODES for graph in ("mfgs", "full")}
    return found


def check_sampling(every: list[Any]) -> None:
    """Ranks have one model, it has learned, and its inference is that of one process."""
    g, model = data.arxiv(), models.GNNModel("sage")
    model.load_state_dict(every[0]["state"])
    expected = model(g, g.ndata["features"]).detach()
    for found in every:
        assert found["losses"] == every[0]["losses"] and found["losses"][-1] < found["losses"][0]
        torch.testing.assert_close(found["logits"], expected[found["ids"]], rtol=1e-9, atol=1e-9)
