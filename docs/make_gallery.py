"""Run the scripts of examples/gallery and write a page for each: prose, code, what it printed, its plot.

    python docs/make_gallery.py              # all of them
    python docs/make_gallery.py weather_mesh
    python docs/make_gallery.py --prose      # runs nothing: where prose has changed, and code has not

A script is in the percent format, which jupytext and editors know: `# %%` begins a cell of code, `# %% [markdown]` a
cell of prose. The pages are committed without their code, which `docs/docstrings.py` puts in where a comment names the
cell. So the site builds without running anything. The comment has a fingerprint of the code that has printed the
outputs below it, which tests/test_gallery.py compares.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "examples" / "gallery"
PAGES = HERE / "gallery"
ORDER = (
    "node_classification",
    "weather_mesh",
    "knowledge_graph",
    "link_prediction",
    "inference_own_ids",
    "sampled_training",
    "larger_than_memory",
    "moving_from_dgl",
)
CELL = re.compile(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", re.S | re.M)
OUTPUT = re.compile(r"\n```text\n.*?\n```\n|\n!\[[^\]]*\]\([^)]*\)\n", re.S)
DARK = """@media (prefers-color-scheme: dark) {
    [style*="fill: #ffffff"] {fill: #14171d !important}
    [style*="stroke: #000000"] {stroke: #e6e6e6 !important}
    text {fill: #e6e6e6}
  }"""
"""The ground and the ink of a plot in the dark; its data keep their colours."""
TITLE = re.compile(r"<dc:title>(.*?)</dc:title>", re.S)


def cells(script: Path) -> list[tuple[bool, str]]:
    """``(is_prose, text)`` of each cell."""
    found = CELL.findall(script.read_text(encoding="utf-8"))
    return [(bool(mark), re.sub(r"^# ?", "", text, flags=re.M) if mark else text) for mark, text in found]


def code_cell(script: Path, number: int) -> str:
    """The comment that stands for a cell of code."""
    code = cells(script)[number][1].strip()
    return f"<!-- cell: {script.stem} {number} {hashlib.sha256(code.encode()).hexdigest()[:8]} -->\n"


def page_of(script: Path, outputs: list[str] | None = None) -> str:
    """The page of a script; without `outputs` it has prose and code alone."""
    parts = []
    for number, (is_prose, text) in enumerate(cells(script)):
        parts.append(f"{text.strip()}\n" if is_prose else code_cell(script, number))
        parts.append(outputs[number] if outputs else "")
    parts.append(f"The script: `examples/gallery/{script.name}`\n")
    return "\n".join(part for part in parts if part)


def without_outputs(page: str) -> str:
    """A page with prose and code alone."""
    return OUTPUT.sub("", page)


def outputs_of(script: Path) -> list[str]:
    """What the page of a script shows below each of its cells.

    Raises:
        ValueError: the page has other code.
    """
    page, outputs = (PAGES / f"{script.stem}.md").read_text(encoding="utf-8"), list[str]()
    for number, (is_prose, _) in enumerate(cells(script)):
        _, block, rest = page.partition(code_cell(script, number))
        if not is_prose and not block:
            raise ValueError(f"the page of {script.name} has other code: run python docs/make_gallery.py {script.stem}")
        found = re.match(f"(?:{OUTPUT.pattern})+", rest, re.S) if block else None
        outputs.append("" if is_prose or not found else found[0][1:])
    return outputs


def in_the_dark(svg: str) -> str:
    """A plot of matplotlib that is also drawn light on dark."""
    return svg.replace("</style>", f"{DARK}</style>", 1)


def run(script: Path) -> None:
    """Run a script cell by cell in this process and this folder; write its page and its plots."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gallery", "font.family": "sans-serif"}
    sys.argv, sys.path[0] = [str(script)], str(SCRIPTS)
    names, outputs, drawn = {"__name__": "__main__", "__file__": str(script)}, list[str](), set[Path]()
    source = script.read_text(encoding="utf-8").splitlines()
    for is_prose, text in cells(script):
        printed = io.StringIO()
        if not is_prose:
            first = source.index(text.splitlines()[0])
            with redirect_stdout(printed):
                exec(compile("\n" * first + text, script, "exec"), names)
        output = f"```text\n{printed.getvalue().rstrip()}\n```\n" if printed.getvalue() else ""
        for plot in sorted(set(Path().glob("*.svg")) - drawn):
            drawn.add(plot)
            svg = re.sub(r"[ \t]+$", "", plot.read_text(encoding="utf-8"), flags=re.M)
            (PAGES / plot.name).write_text(in_the_dark(svg), encoding="utf-8")
            title = TITLE.search(svg)
            assert title, f"{script.name}: savefig with metadata=dict(Title=...), which says what the plot shows"
            output += ("\n" if output else "") + f"![{title[1]}]({plot.name})\n"
        outputs.append(output)
    (PAGES / f"{script.stem}.md").write_text(page_of(script, outputs), encoding="utf-8")


def index() -> str:
    """The first page of the gallery: title and plot of each."""
    parts = [
        "# Gallery\n\nEight jobs from beginning to end. Each page is a script of `examples/gallery` that runs within a "
        "minute on two quiet\ncores, with what it printed and drew. The site shows the code in its places. Each page "
        "names the largest size that was\ntested.\n"
    ]
    for name in ORDER:
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        title = page.partition("\n")[0]
        plot = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page)[-1]
        parts.append(f"#{title.replace('# ', '# [')}]({name}.md)\n\n![{plot[0]}]({plot[1]})\n")
    return "\n".join(parts)


def main() -> None:
    """Each script runs in a process and a folder of its own."""
    if sys.argv[1:2] == ["--here"]:
        run(SCRIPTS / f"{sys.argv[2]}.py")
        return
    names = [name for name in sys.argv[1:] if name != "--prose"] or ORDER
    for name in names:
        script = SCRIPTS / f"{name}.py"
        if "--prose" in sys.argv:
            (PAGES / f"{name}.md").write_text(page_of(script, outputs_of(script)), encoding="utf-8")
            continue
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, __file__, "--here", name], cwd=folder, env=env, check=True)
    (PAGES / "index.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main()
