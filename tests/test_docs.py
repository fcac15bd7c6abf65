"""The documentation is true: names exist, links resolve, the site builds. tests/test_pasted.py runs its blocks."""

import ast
import importlib.util
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import shardpass as sp
from benchmarks.comparison import figures
from docs.docstrings import table_of_files
from tests.site_build import build_site

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
READABLE = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages without a sentence of more than 30 words."""
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "gallery").glob("*.md"))]
LONG = ["design.md", "concepts.md"]
"""The tour of the code, and the concepts with their pictures: the only guides of 1,000 words or more beside code."""

LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)


def small_data() -> Any:
    """A PyG graph to train on."""
    data = pytest.importorskip("torch_geometric.datasets").FakeDataset(num_channels=8, num_classes=3)[0]
    data.train_mask = torch.arange(data.num_nodes) % 2 == 0
    return data


def small_dgl_graph() -> Any:
    """The same with DGL's names."""
    data, dgl = small_data(), pytest.importorskip("dgl")
    g = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    g.ndata.update(feat=data.x, label=data.y, train_mask=data.train_mask)
    return g


@pytest.mark.parametrize(
    ("page", "library"),
    [
        ("README.md", "torch_geometric"),
        ("docs/index.md", "torch_geometric"),
        ("docs/llms.txt", "torch_geometric"),
        ("docs/llms.txt", "dgl"),
    ],
)
def test_a_script_changes_in_five_lines_and_then_runs(
    page: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diffs of scripts: the script before and the script after have the same losses."""
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    (diff,) = [found for found in diffs if library in found]
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) == 5
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    losses = dict[str, float]()
    if library == "dgl":
        data = small_dgl_graph()
        importlib.import_module("dgl").save_graphs("graph.bin", [data])
    else:
        data = small_data()
        torch.save(data, "graph.pt")
    sp.partition(data, "parts", parts=8, method="random")
    for name, script in {"old": old, "new": new}.items():
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(compile(script.replace("range(20)", "range(5)"), f"{page}, {name}", "exec"), names)
        losses[name] = names["loss"].item()
    assert losses["new"] == pytest.approx(losses["old"], rel=1e-4)


def sentences(page: Path) -> list[str]:
    """The sentences of a page without its code, tables and headings."""
    text = re.sub(r"<!--.*?-->", "", FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    prose = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[)", line)]
    paragraphs = re.split(r"\n\s*\n|\n\s*[*-] |\n\d\. ", "\n".join(prose))
    return [found for paragraph in paragraphs for found in re.split(r"(?<=[.?!])[*)]*\s+", " ".join(paragraph.split()))]


@pytest.mark.parametrize("page", READABLE, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    assert not [found for found in sentences(page) if len(found.split()) > 30]


@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in LONG], ids=lambda page: page.name)
def test_the_guides_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(FENCED.sub("", text).split()) < 1000


def test_the_readme_is_of_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_a_sentence_of_31_words_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n\nShort.\n\n" + "word " * 30 + "end. Short.\n\n```\n" + "code " * 40 + "\n```\n")
    assert [len(found.split()) for found in sentences(page) if found] == [1, 31, 1]


def test_the_page_for_assistants_is_true() -> None:
    """Each name of ``docs/llms.txt`` exists, its parameters and defaults are those of the code, and none is missing."""
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"\bsp\.((?:pyg\.|dgl\.)?\w+)", text))
    found = {name: attrgetter(name)(sp) for name in named - {"pyg", "dgl"}}
    assert not [name for name in sp.__all__ if name not in named | {"Communicator", "GraphCounts", "Plan"}]
    for call in re.findall(r"`sp\.([\w.]+)\(([^`]*)\)`", text[text.index("## Starting") :]):
        given = ast.parse(f"def f({call[1]}): pass").body[0]
        assert isinstance(given, ast.FunctionDef)
        parameters = inspect.signature(found[call[0]]).parameters
        arguments = [argument.arg for argument in (*given.args.args, *given.args.kwonlyargs)]
        order = [name for name in parameters if name in arguments]
        assert order == arguments, f"sp.{call[0]}{inspect.signature(found[call[0]])}"
        after = arguments[len(given.args.args) - len(given.args.defaults) :]
        for name, default in zip(after, [*given.args.defaults, *given.args.kw_defaults]):
            assert default is not None and ast.literal_eval(default) == parameters[name].default, f"{call[0]}: {name}"
    listed = re.search(r"Not collective: (.*?), and reading", text, re.S)
    assert listed is not None
    calm = set(re.findall(r"sp\.(\w+)", listed[1]))
    for name, value in found.items():
        if inspect.isfunction(value):
            is_collective = re.search(r"(?<!ot c)(?<!is c)ollective", inspect.getdoc(value) or "", re.I) is not None
            assert is_collective != (name in calm), name


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as mkdocs and the usual hosts make them."""
    titles = re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = (page.parent / target).resolve() if target else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            broken.append(match["target"])
    assert not broken, f"{page.name}: {broken}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks (``core/exchange/halo.py``, ``tests/backends/contract.py``) are those of files."""
    if page.name == "CHANGELOG.md":
        return
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    named = re.findall(
        r"`((?:shardpass/|core/|backends/|data/|frontends/|testing/|cli/|tests/|docs/)[\w/.-]+\.py)`", text
    )
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "shardpass" / name).exists()]
    assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=lambda page: page.name)
def test_the_page_of_a_room_lists_its_files(page: Path) -> None:
    """The site makes the table of them from their docstrings."""
    room = ROOT / "shardpass" / "core" / page.stem
    text = page.read_text(encoding="utf-8")
    assert not room.exists() or f"<!-- files: core/{page.stem} -->" in text
    for folder in re.findall(r"<!-- files: (\S+) -->", text):
        rows = table_of_files(folder).splitlines()[2:]
        files = [path.name for path in (ROOT / "shardpass" / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(rows) >= len(files) > 0 and all(f"| `{name}` | " in "\n".join(rows) for name in files)


def test_every_room_has_a_page() -> None:
    rooms = {path.parent.name for path in (ROOT / "shardpass" / "core").glob("*/__init__.py")}
    tour = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert not [room for room in rooms if f"(design/{room}.md)" not in tour]


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in sp.__all__ if f"shardpass.{name}" not in text]
    assert not missing, f"docs/api.md lacks {missing}"


def test_the_home_page_names_the_version() -> None:
    assert f"Version {sp.__version__} " in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_figures_are_up_to_date(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "docs" / "make_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, draw in module.FIGURES.items():
        found = (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")
        assert found == draw(), f"run python docs/make_figures.py: {name} is out of date"


def test_the_comparison_has_the_figures_of_the_last_report() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert figures() in page, "docs/comparison.md is not what python -m benchmarks.comparison prints"


def test_the_navigation_has_every_page_once() -> None:
    """The site builder warns of neither a page that is missing nor one that no entry leads to."""
    yaml = pytest.importorskip("yaml")
    listed = re.findall(r"[\w/.-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages)


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff", "docs/llms.txt", ".github/ISSUE_TEMPLATE/config.yml"])
def test_addresses_of_the_site_are_those_of_pages(name: str) -> None:
    """What points to the site from outside; a page that moves needs a new address there."""
    found = re.findall(r"https://shardpass\.readthedocs\.io/([\w/-]*)", (ROOT / name).read_text(encoding="utf-8"))
    assert not [path for path in found if path and not (ROOT / "docs" / f"{path.strip('/')}.md").exists()]


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for page in build_site(tmp_path).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link)[^>]+(?:src|href)=\"?(https?://[^\">\s]+)", text)
        outside = [url for url in fetched if not url.startswith("https://shardpass.readthedocs.io")]
        assert not outside, f"{page.name} loads {outside}"
