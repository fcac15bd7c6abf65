"""The commands that the documentation prints run as they are printed, in the order of their page."""

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardpass as sp
from shardpass.cli.launch import find_program, launcher_environment
from tests.test_docs import GIVEN, ROOT, small_data

pytestmark = [pytest.mark.long, pytest.mark.processes]
NAMES = "README quickstart launching recipes failures memory partitioning large-graphs names inference"
PAGES = [ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md" for name in NAMES.split()]
BLOCK = re.compile(
    r"(?:<!-- (?P<comment>not run|runnable)(?:: (?P<why>[^>]*?))? -->\n)?"
    r"```(?P<kind>console|sh|bash|python)\n(?P<code>.*?)^```",
    re.S | re.M,
)


def write_script() -> None:
    """``train.py`` as the README has it after the change, with fewer epochs."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    Path("train.py").write_text("\n".join(lines).replace("range(100)", "range(3)"))


def write_parts() -> None:
    sp.partition(small_data(), "parts", parts=8, method="random")


def write_arrays() -> None:
    data = small_data().to_dict()
    np.savez("graph.npz", **{name: value.numpy() for name, value in data.items()})


def write_files() -> None:
    rng = np.random.default_rng(0)
    np.save("big-edges.npy", rng.integers(0, 5000, (2, 60000)))
    np.save("big-x.npy", rng.standard_normal((5000, 4), dtype=np.float32))
    np.save("big-y.npy", rng.integers(0, 4, 5000))


FILES: dict[str, list[Callable[[], None]]] = {
    "README.md": [write_script],
    "launching.md": [write_arrays, write_script],
    "recipes.md": [write_parts],
    "failures.md": [write_parts],
    "memory.md": [write_parts],
    "partitioning.md": [write_files],
}
"""What the reader of a page has already."""


def environment(folder: Path) -> dict[str, str]:
    """That of a user who has activated this environment, on a machine with many cores and with Slurm."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "fake_srun.py"}" "$@"\n')
    srun.chmod(0o755)
    paths = [srun.parent, Path(sys.executable).parent, Path(find_program("mpirun") or "/").parent, os.environ["PATH"]]
    kept = {key: value for key, value in launcher_environment().items() if not re.match(r"RANK$|WORLD_SIZE$|PMI", key)}
    own = {"PATH": os.pathsep.join(map(str, paths)), "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": str(os.getpid())}
    return {**kept, **own, "COLUMNS": "120"}


def commands(code: str) -> str:
    """What is run of a block. Where commands begin with ``$``, other lines are output.

    ``make`` and ``pip install`` are left out: they would change this environment; `make wheel` has an empty one.
    """
    typed = "\n".join(re.findall(r"^\$ (.*)$", code, re.M)) or code
    return "set -eux -o pipefail\n" + re.sub(r"^(make|pip install) .*$", "", typed, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    variables, module = environment(tmp_path), types.ModuleType("documented_commands")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = vars(module)
    for write in FILES.get(page.name, []):
        write()
    run, threads = 0, torch.get_num_threads()
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["comment"] == "not run":
            assert block["why"], "say why it is not run"
        elif block["kind"] != "python":
            words = ["bash", "-c", commands(block["code"])]
            done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=1700, check=False)
            assert done.returncode == 0, f"{page.name}\n{block['code']}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
            run += 1
        elif block["comment"] == "runnable":
            if block["why"]:
                names[block["why"]] = names.get(block["why"]) or GIVEN[block["why"]]()
            exec(compile(block["code"], page.name, "exec"), names)
            torch.set_num_threads(threads)
    assert run
