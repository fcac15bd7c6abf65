"""Every example runs as its docstring says, and ends in the number it should."""

import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import shardpass as sp
from shardpass.cli.launch import find_program, launcher_environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ACM = Path(__file__).resolve().parents[2] / "shared" / "data" / "acm_hetero.npz"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [find_program("mpirun") or "mpirun", "-n", "4", sys.executable],
}


def run(launcher: str, name: str, folder: Path, *arguments: str) -> str:
    """What an example prints; without a launcher it runs in this process, which is quicker."""
    program = [str(EXAMPLES / f"{name}.py"), *arguments]
    if launcher == "python":
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.chdir(folder)
            patch.setattr(sys, "argv", program)
            before = torch.get_default_dtype()
            try:
                runpy.run_path(program[0], run_name="__main__")
            finally:
                torch.set_default_dtype(before)  # an example may set it for itself
        return printed.getvalue()
    command = [*LAUNCHERS[launcher], *program]
    env = launcher_environment()
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, since the first run partitions and the others use the parts."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("python", 1),
        pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long]),
        pytest.param("mpirun", 4, marks=[pytest.mark.mpi, pytest.mark.long]),
    ],
)
def test_train_pyg(launcher: str, ranks: int, folder: Path) -> None:
    if launcher == "mpirun" and find_program("mpirun") is None:
        pytest.skip("there is no mpirun here")
    text = run(launcher, "train_pyg", folder)
    found = re.search(r"test accuracy ([0-9.]+) on (\d+) rank", text)
    assert found and float(found[1]) == pytest.approx(0.973, abs=0.005) and int(found[2]) == ranks
    assert "epoch 40: loss 0.03" in text


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_recipes(launcher: str, ranks: int, folder: Path) -> None:
    """The second run goes on where the first one stood, stops early, and ends with the best model of all epochs."""
    for name in ("run.ckpt", "best.ckpt", "log.csv"):
        (folder / name).unlink(missing_ok=True)
    assert "from epoch 0: " in run(launcher, "recipes", folder, "3")
    text = run(launcher, "recipes", folder, "200")
    found = re.search(r"from epoch 3: best accuracy ([0-9.]+), restored ([0-9.]+)", text)
    assert found and float(found[1]) > 0.9 and abs(float(found[1]) - float(found[2])) < 0.002
    values = [float(line.split(",")[2]) for line in (folder / "log.csv").read_text().splitlines()]
    assert len(values) < 200 and values[-6] == max(values), "five without a rise"
    assert values[-6] == pytest.approx(float(found[1]), abs=1e-4)


def test_custom_layer(folder: Path) -> None:
    text = run("python", "custom_layer", folder)
    found = re.search(r"largest difference ([0-9.e+-]+) on 4 ranks", text)
    assert found and float(found[1]) < 1e-10


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_hetero(launcher: str, ranks: int, folder: Path) -> None:
    text = run(launcher, "hetero", folder)
    found = re.search(r"loss ([0-9.]+), test accuracy ([0-9.]+) on (\d+) rank", text)
    assert found and float(found[1]) < 0.15 and float(found[2]) > 0.9 and int(found[3]) == ranks


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_link_prediction(launcher: str, ranks: int, folder: Path) -> None:
    """The same pairs on any number of ranks."""
    text = run(launcher, "link_prediction", folder)
    found = re.search(r"loss ([0-9.]+), area under the ROC curve ([0-9.]+) on (\d+) rank", text)
    assert found and float(found[1]) == pytest.approx(0.474, abs=0.01) and int(found[3]) == ranks
    assert float(found[2]) == pytest.approx(0.935, abs=0.005)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_nbfnet(launcher: str, ranks: int, folder: Path) -> None:
    """It finds the facts held out, which by chance would have a mean reciprocal rank of 0.03."""
    found = re.search(r"loss ([0-9.]+), MRR ([0-9.]+), hits.* on (\d+) rank", run(launcher, "nbfnet", folder))
    assert found and float(found[2]) > 0.95 and int(found[3]) == ranks
    assert float(found[1]) == pytest.approx(0.032, abs=0.005)


@pytest.mark.parametrize(
    ("launcher", "groups"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_groups(launcher: str, groups: int, folder: Path) -> None:
    text = run(launcher, "groups", folder)
    found = re.findall(r"group \d of (\d), 1 rank\(s\): accuracy ([0-9.]+)", text)
    assert [(int(of), float(accuracy) > 0.97) for of, accuracy in found] == [(groups, True)] * groups


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_lightning(launcher: str, ranks: int, folder: Path) -> None:
    """It stops early, in the same epoch on any number of ranks and after a break, with the best model."""
    pytest.importorskip("lightning")
    shutil.rmtree(folder / "lightning-ckpt", ignore_errors=True)
    assert "epoch 3: " in run("python", "lightning_trainer", folder, "3")
    text = run(launcher, "lightning_trainer", folder, "100")
    found = re.search(r"epoch (\d+): test accuracy ([0-9.]+) on (\d+) rank", text)
    assert found and int(found[1]) == 34 and int(found[3]) == ranks
    assert float(found[2]) == pytest.approx(0.963, abs=0.005)


ROUNDS = (
    "send in round 0 (",
    "compute own block (",
    "wait for block 1 (",
    "compute block 1 (",
    "wait for gradients of",
)
"""How the names of what a rank does in a call begin in a trace."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("python", 1), pytest.param("torchrun", 2, marks=pytest.mark.processes)]
)
def test_profiling(launcher: str, ranks: int, folder: Path) -> None:
    """A trace in the format of Chrome: a process for each rank at the same time, with the rounds, and whole arrows."""
    run(launcher, "profiling", folder, f"{launcher}.json")
    events = json.loads((folder / f"{launcher}.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {rank + 1: f"rank {rank}" for rank in range(ranks)} and {event["pid"] for event in events} == {
        *named
    }
    blocks = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["tid"], int) for event in blocks)
    steps = [event for event in blocks if event["name"] == "forward"]
    assert len(steps) == ranks and max(step["ts"] for step in steps) < min(step["ts"] + step["dur"] for step in steps)
    for rank in range(ranks):
        names = {event["name"] for event in blocks if event["pid"] == rank + 1}
        assert [words for words in ROUNDS if any(name.startswith(words) for name in names)] == (
            [*ROUNDS] if ranks > 1 else ["compute own block ("]
        )
        assert any(name.endswith("GATConv (convs.1))") for name in names), "the layer is named"
    ends = [sorted(event["id"] for event in events if event["ph"] == kind) for kind in ("s", "f")]
    assert ends[0] and ends[0] == ends[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_sweep(launcher: str, ranks: int, folder: Path) -> None:
    """The same accuracies on any number of ranks, which TensorBoard reads from the logs too."""
    pytest.importorskip("hydra")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = run(launcher, "sweep", folder, "--multirun", f"hydra.sweep.dir=sweep-{launcher}", "lr=0.001,0.01,0.1")
    found = re.findall(rf"lr ([0-9.]+): accuracy ([0-9.]+) on {ranks} rank\(s\), log in (.*)", text)
    assert [rate for rate, *_ in found] == ["0.001", "0.01", "0.1"]
    assert [float(accuracy) for _, accuracy, _ in found] == pytest.approx([0.133, 0.935, 0.591], abs=0.01)
    for _, accuracy, log in found:
        read = EventAccumulator(log).Reload().Scalars("val")
        assert [point.step for point in read] == list(range(20))
        assert read[-1].value == pytest.approx(float(accuracy), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("mpirun", 4, marks=[pytest.mark.mpi, pytest.mark.long])],
)
def test_meshgraphnets(launcher: str, ranks: int, folder: Path) -> None:
    """The same error on any number of ranks."""
    if launcher == "mpirun" and find_program("mpirun") is None:
        pytest.skip("there is no mpirun here")
    pytest.importorskip("matplotlib")
    text = run(launcher, "meshgraphnets", folder, "heat.svg")
    assert "<svg" in (folder / "heat.svg").read_text()
    found = re.search(r"error ([0-9.]+) over 20 steps, ([0-9.]+) if nothing changed, on (\d+) rank", text)
    assert found and float(found[1]) < float(found[2]) / 2 and int(found[3]) == ranks


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_forces(launcher: str, ranks: int, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    text = run(launcher, "forces", folder, "parity.svg")
    assert "<svg" in (folder / "parity.svg").read_text()
    found = re.findall(r"error ([0-9.]+), size ([0-9.]+), on (\d+) rank", text)
    assert [float(error) / float(size) for error, size, _ in found] == pytest.approx([0.515, 0.123, 0.086], abs=0.002)
    assert {int(of) for *_, of in found} == {ranks}


@pytest.mark.parametrize("kind", ["SchNet", "Mace"])
def test_forces_are_the_same_on_three_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["forces.py"])
    monkeypatch.syspath_prepend(EXAMPLES)  # PyG looks up the module in which a layer is defined
    torch.set_default_dtype(torch.float64)
    try:
        example = vars(importlib.import_module("forces"))
        whole, shared = (
            sp.spawn(example["train"], ranks, args=(example["labelled"](), example[kind], 3))[0] for ranks in (1, 3)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(shared, whole, rtol=1e-9, atol=1e-9)


def test_labels_of_copper(folder: Path) -> None:
    pytest.importorskip("ase")
    run("python", "copper_labels", folder, "copper.pt")
    text = run("python", "forces", folder, "copper.pt")
    found = re.search(r"forces: error ([0-9.]+), size ([0-9.]+)", text)
    assert found and float(found[1]) < 0.15 * float(found[2])


def test_one_device(folder: Path) -> None:
    """The numbers of PyG, with less memory."""
    text = run("python", "one_device", folder, "8000", "20", "cpu")
    found = re.findall(r"(\w+): loss ([0-9.]+), [0-9.]+ s a step, (\d+) MiB at its peak", text)
    assert [name for name, *_ in found] == ["shardpass", "PyG"]
    (_, loss, peak), (_, expected, most) = found
    assert float(loss) == pytest.approx(float(expected), abs=2e-4) and (
        sys.platform != "linux" or 2 * int(peak) < int(most)
    )


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
def test_structures(launcher: str, ranks: int, folder: Path) -> None:
    """The same energies on any number of ranks, and memory stays as it is."""
    if sys.platform != "linux":
        pytest.skip("it reads the memory of the process from /proc")
    text = run(launcher, "structures", folder, "40")
    found = re.search(r"mean energy ([0-9.]+), on (\d+) rank\(s\)\n.*: ([0-9.]+) of that", text)
    assert found and float(found[1]) == pytest.approx(12.367715, abs=1e-5) and int(found[2]) == ranks
    assert float(found[3]) < 1.03


DGL_EXAMPLES = {
    "train_dgl": (r"SAGE: .* accuracy ([0-9.]+) on (\d+) rank[^$]*GAT: .* accuracy ([0-9.]+) on", [0.968, 0.964]),
    "dgl_appnp": (r"accuracy ([0-9.]+) on (\d+) rank", [0.971]),
    "dgl_correct_and_smooth": (r"([0-9.]+) of the MLP, [0-9.]+ smoothed on (\d+) rank", [0.919]),
    "dgl_sign": (r"accuracy ([0-9.]+) on (\d+) rank", [0.977]),
    "dgl_rgcn": (r"accuracy ([0-9.]+) on (\d+) rank", [0.873]),
}


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long])],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("dgl_appnp", "dgl_sign", "dgl_rgcn")))
        for name in DGL_EXAMPLES
    ],
)
def test_dgl(name: str, launcher: str, ranks: int, folder: Path) -> None:
    pytest.importorskip("dgl")
    arguments = [str(ACM), "paper"] if name == "dgl_rgcn" else []
    if arguments and not ACM.exists():
        pytest.skip("the ACM graph is not here")
    text = run(launcher, name, folder, *arguments)
    pattern, accuracies = DGL_EXAMPLES[name]
    found = re.search(pattern, text)
    assert found and int(found[2]) == ranks, text
    if name == "dgl_correct_and_smooth":
        assert float(re.search(r"([0-9.]+) smoothed", text)[1]) == pytest.approx(0.975, abs=0.005)
    assert [float(found[1]), *map(float, found.groups()[2:])] == pytest.approx(accuracies, abs=0.006)


def test_dgl_inference(folder: Path) -> None:
    pytest.importorskip("dgl")
    text = run("python", "dgl_inference", folder)
    found = re.search(r"largest difference ([0-9.e+-]+) on 4 ranks", text)
    assert found and float(found[1]) < 1e-5


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("python", 1),
        pytest.param("torchrun", 2, marks=[pytest.mark.processes, pytest.mark.long]),
        pytest.param("mpirun", 4, marks=[pytest.mark.mpi, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize(("name", "accuracy"), [("sampling_pyg", 0.967), ("sampling_dgl", 0.958)])
def test_sampling(name: str, accuracy: float, launcher: str, ranks: int, folder: Path) -> None:
    """The same numbers on any number of ranks."""
    if name == "sampling_dgl":
        pytest.importorskip("dgl")
        if launcher == "mpirun":
            pytest.skip("as with PyG")
    if launcher == "mpirun" and find_program("mpirun") is None:
        pytest.skip("there is no mpirun here")
    text = run(launcher, name, folder)
    found = re.search(r".*test accuracy ([0-9.]+) on (\d+) rank", text, re.S)
    assert found and float(found[1]) == pytest.approx(accuracy, abs=0.004) and int(found[2]) == ranks


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    most = {"meshgraphnets": 130, "forces": 175, "nbfnet": 130}  # their data and pictures are in them
    assert len(text.splitlines()) <= most.get(path.stem, 75)
    assert f"python examples/{path.name}" in text.split('"""')[1]
    assert "argparse" not in text and os.path.basename(path) in text
