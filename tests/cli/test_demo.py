"""`shardpass demo`: memory comes first, a small graph's fixed cost is explained, and it speaks while piped."""

import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import launched, passed
from rich.console import Console

from shardpass.cli.demo import stages
from shardpass.cli.demo.program import Program, Stage, follow
from shardpass.errors import ShardpassError

CHILD = """
import json
for epoch in range(1, 7):
    print(json.dumps({"event": "epoch", "epoch": epoch, "loss": 1 / epoch}), flush=True)
print(json.dumps({"event": "summary", "peak_bytes": [5]}))
"""


def test_a_child_is_followed_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=sys.stdout, force_terminal=False, width=120)
    monkeypatch.setattr("shardpass.cli.console.monotonic", count(0, 5).__next__)  # 5 seconds between any two looks
    records = follow([sys.executable, "-c", CHILD], {}, "the child", 6, console)
    assert [record["event"] for record in records] == ["epoch"] * 6 + ["summary"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  the child ..." and len(lines) == 6
    assert lines[3] == "  the child: epochs: 4 of 6, loss 0.2500, about 10 s left"
    assert re.match(r"  the child: done in \d+ s", lines[-1])
    with pytest.raises(ShardpassError, match=r"the child ended with exit code 3: (?s:.*)boo"):
        follow([sys.executable, "-c", "raise SystemExit(print('boo', file=__import__('sys').stderr) or 3)"], {},
               "the child", 6, console)  # fmt: skip


def made_up(peaks: list[int], epochs: int) -> Stage:
    def program(peaks: list[int]) -> Program:
        lines: list[dict[str, Any]] = [
            {"event": "epoch", "loss": 1 / epoch, "seconds": 0.5, "test": 0.9} for epoch in range(1, epochs + 1)
        ]
        return Program([*lines, {"event": "summary", "peak_bytes": peaks, "test": 0.9}])

    return Stage(program([4 << 30]), program(peaks), "mpirun")


def test_memory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch_geometric", "sklearn", "matplotlib", "kaminpar"):
        pytest.importorskip(module)
    done: list[str] = []

    def run(name: Path, graph: Any, epochs: int, *rest: Any) -> Stage:
        done.append(name.name)
        return made_up([200 << 20, 180 << 20], epochs)

    monkeypatch.setattr(stages, "_run_stage", run)
    text = passed("demo", "--output", tmp_path / "out", "--nodes", 500, "--ranks", 2)
    assert done == ["powerlaw", "digits"]
    assert "a rank needs 200.0 MiB where plain PyG needs 4.00 GiB, 20.5 times as much" in text
    assert text.index("a rank needs") < text.index("Fixed cost: ") < text.index("demo.png")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.processes
def test_the_demo(tmp_path: Path) -> None:
    for module in ("torch_geometric", "sklearn", "matplotlib", "kaminpar"):
        pytest.importorskip(module)
    run = launched("none", 1, "demo", "--output", tmp_path, "--nodes", 3000, "--ranks", 2, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": done in") == 4
    gaps = re.search(r"Losses: the largest gap is (\S+)\.(?s:.*)ranks differ by (\S+) at most", run.stdout)
    assert gaps is not None and max(map(float, gaps.groups())) < 0.02
