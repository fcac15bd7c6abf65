"""`shardpass new`: the script that it writes runs as it is, stops early, goes on where it stood, and is exact."""

import importlib.util
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import passed, refused

import shardpass as sp
from shardpass.cli.launch import launcher_environment

ROOT = Path(__file__).parents[2]
FRONTENDS = [("PyG", "torch_geometric", ()), ("DGL", "dgl", ("--dgl",))]


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "library", "flags"), FRONTENDS)
def test_the_script_runs_on_one_rank_and_on_two(
    name: str, library: str, flags: tuple[str, ...], store: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    told = passed("new", "run/train.py", *flags)
    assert "python run/train.py parts" in told and f"Train a {name} model" in Path("run/train.py").read_text()
    module = imported(Path("run/train.py"))
    options = Namespace(
        store=str(store), epochs=3, patience=5, hidden=8, lr=0.05, seed=0, checkpoint="", resume=False, best=""
    )
    found = []
    for ranks in (1, 2):
        monkeypatch.setattr(module.torch.nn.Dropout, "forward", lambda self, x: x)  # ranks draw numbers of their own
        found.append(sp.spawn(module.train, ranks, args=(options,)))
        assert f"on {ranks} rank(s); best at epoch" in capsys.readouterr().out
    assert found[0][0] == pytest.approx(found[1][0]) and found[1][0] == found[1][1]
    assert not [*tmp_path.glob("*.ckpt")], "nothing is written that was not named"

    def run(**other: Any) -> None:
        named = {"checkpoint": "run.ckpt", "best": "best.ckpt", "resume": True}
        sp.spawn(module.train, 2, args=(Namespace(**{**vars(options), **named, **other}),))

    run(resume=False)
    capsys.readouterr()
    for other, words in (
        ({"resume": False}, "is there already: --resume goes on"),
        ({"lr": 0.5}, "hidden, lr, seed = .8, 0.05, 0.: not as asked"),
        ({"epochs": 2}, "has 3 epochs"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(**other)
    run(epochs=40)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best at epoch" in line]
    total, best = int(line.split()[0]), int(line.split("best at epoch ")[1].split(":")[0])
    assert 3 < total < 40 and total == best + 5, "it went on where it stood, and stopped early"


def test_the_script_for_dgl_takes_the_names_of_dgl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dgl = pytest.importorskip("dgl")
    monkeypatch.chdir(tmp_path)
    nodes = torch.arange(20)
    g = dgl.graph((nodes.repeat(2), torch.cat([(nodes + 1) % 20, nodes])))
    g.ndata["feat"], g.ndata["label"] = torch.randn(20, 4), nodes % 3
    for name in ("train_mask", "val_mask", "test_mask"):
        g.ndata[name] = nodes % 2 == 0
    sp.partition(g, "parts", parts=2, method="range")
    passed("new", "train.py", "--dgl")
    text = Path("train.py").read_text()
    assert text.count('FEATURES, LABELS = "x", "y"') == 1
    Path("train.py").write_text(text.replace('FEATURES, LABELS = "x", "y"', 'FEATURES, LABELS = "feat", "label"'))
    options = Namespace(
        store="parts", epochs=2, patience=5, hidden=8, lr=0.05, seed=0, checkpoint="", resume=False, best=""
    )
    assert len(sp.spawn(imported(Path("train.py")).train, 2, args=(options,))) == 2


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("name", "library", "flags"), FRONTENDS)
def test_the_commands_that_it_prints_run(name: str, library: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(library)
    run([sys.executable, "-m", "shardpass.cli", "new", "train.py", *flags], tmp_path)
    lines = [line.strip().split("#")[0] for line in (tmp_path / "train.py").read_text().splitlines()[2:6]]
    programs = {"shardpass": ["-m", "shardpass.cli"], "python": [], "torchrun": ["-m", "torch.distributed.run"]}
    for line in lines:
        first, *words = shlex.split(line)
        if first in programs:
            out = run([sys.executable, *programs[first], *words], tmp_path)
            assert first == "shardpass" or "test accuracy" in out


def run(command: list[str], folder: Path) -> str:
    env = {**launcher_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("precious")
    assert "is there already" in refused("new", tmp_path / "mine.py")
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert "is there already" in refused("new", tmp_path)
    assert "cannot be written" in refused("new", tmp_path / "mine.py" / "train.py")


@pytest.mark.parametrize("flags", [(), ("--dgl",)])
def test_the_script_is_written_as_this_repository_is(flags: tuple[str, ...], tmp_path: Path) -> None:
    passed("new", tmp_path / "train.py", *flags)
    ruff = [sys.executable, "-m", "ruff"]
    if subprocess.run([*ruff, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no ruff")
    for words in (["check"], ["format", "--check"]):
        command = [*ruff, *words, "--config", str(ROOT / "pyproject.toml"), str(tmp_path / "train.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
