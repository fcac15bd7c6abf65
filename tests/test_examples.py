"""Every example runs as its docstring says, and ends in the number it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardpass.cli.launch import find_program, launcher_environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [find_program("mpirun") or "mpirun", "-n", "4", sys.executable],
}


def run(command: list[str], folder: Path) -> str:
    env = launcher_environment()
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
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
        pytest.param("torchrun", 2, marks=pytest.mark.processes),
        pytest.param("mpirun", 4, marks=pytest.mark.mpi),
    ],
)
def test_train_pyg(launcher: str, ranks: int, folder: Path) -> None:
    if launcher == "mpirun" and find_program("mpirun") is None:
        pytest.skip("there is no mpirun here")
    text = run([*LAUNCHERS[launcher], str(EXAMPLES / "train_pyg.py")], folder)
    found = re.search(r"test accuracy ([0-9.]+) on (\d+) rank", text)
    assert found and float(found[1]) == pytest.approx(0.973, abs=0.005) and int(found[2]) == ranks
    assert "epoch 40: loss 0.03" in text


def test_custom_layer(folder: Path) -> None:
    text = run([sys.executable, str(EXAMPLES / "custom_layer.py")], folder)
    found = re.search(r"largest difference ([0-9.e+-]+) on 4 ranks", text)
    assert found and float(found[1]) < 1e-10


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("python", 1), pytest.param("torchrun", 2, marks=pytest.mark.processes)]
)
def test_hetero(launcher: str, ranks: int, folder: Path) -> None:
    text = run([*LAUNCHERS[launcher], str(EXAMPLES / "hetero.py")], folder)
    found = re.search(r"loss ([0-9.]+), test accuracy ([0-9.]+) on (\d+) rank", text)
    assert found and float(found[1]) < 0.15 and float(found[2]) > 0.9 and int(found[3]) == ranks


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in text.split('"""')[1]
    assert "argparse" not in text and os.path.basename(path) in text
