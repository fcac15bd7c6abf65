"""Who may import whom: an AST walk over the package. See docs/design.md."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.source import PACKAGE, ROOT, dotted, imports, is_type_checking, modules, name_of, parse, words

REQUIRED = words("torch numpy safetensors")
OPTIONAL = words(
    "torch_geometric dgl mpi4py numba kaminpar pymetis typer rich click matplotlib sklearn scipy pandas pyarrow "
    "duckdb ogb tqdm networkx triton tensorboard"
)
"""Packages that may be absent. Imported at module level only where `Layer.third_party` says so."""


@dataclass(frozen=True)
class Layer:
    """What the modules of one folder may import.

    Args:
        own: prefixes of shardpass modules.
        third_party: packages besides those in `REQUIRED` and the standard library, at module level too.
        lazy: packages that may be imported inside functions only.
        lazy_own: prefixes of shardpass modules that may be imported inside functions only.
    """

    own: tuple[str, ...]
    third_party: frozenset[str] = frozenset()
    lazy: frozenset[str] = frozenset()
    lazy_own: tuple[str, ...] = ()


COMMUNICATOR = "shardpass.backends.communicator"
BASE = ("shardpass.errors", COMMUNICATOR, "shardpass.backends.delegating")
CORE = (*BASE, "shardpass.core")

ROOMS: dict[str, str] = {
    "ranks": "",
    "following": "ranks",
    "sharding": "ranks",
    "training": "ranks following",
    "exchange": "ranks sharding",
    "tracing": "ranks following sharding",
    "kernels": "ranks sharding tracing",
    "memory": "ranks following tracing",
    "graphs": "ranks following sharding exchange",
    "aggregation": "ranks sharding training exchange tracing kernels",
    "sampling": "ranks sharding exchange kernels graphs",
    "inference": "ranks following sharding training graphs",
    "wrapping": "ranks following training exchange memory graphs",
    "dryrun": "ranks sharding training exchange kernels graphs",
}
"""The rooms of ``core/`` from the lowest to the highest, and the rooms that each may import."""


def room(name: str) -> Layer:
    """The layer of one room of ``core/``."""
    own = tuple(f"shardpass.core.{other}" for other in (name, *ROOMS[name].split()))
    if name == "kernels":
        return Layer((*BASE, *own), third_party=words("numba llvmlite triton"))
    if name == "exchange":
        return Layer((*BASE, *own), lazy=words("scipy"))  # which finds matchings
    if name == "sampling":
        return Layer((*BASE, *own), third_party=words("numba"))
    return Layer((*BASE, *own))


LAYERS: dict[str, Layer] = {
    **{f"core/{name}": room(name) for name in ROOMS},
    "core": Layer(()),
    "backends": Layer(("shardpass.errors", "shardpass.backends"), lazy=words("mpi4py")),
    "data": Layer(
        (*CORE, "shardpass.connection", "shardpass.data"),
        lazy=words("kaminpar pymetis torch_geometric pyarrow duckdb pandas ogb scipy"),
    ),
    "data/streaming": Layer((*CORE, "shardpass.data"), third_party=words("numba")),
    "frontends/pyg": Layer(
        (*CORE, "shardpass.connection", "shardpass.testing", "shardpass.frontends.pyg"),
        third_party=words("torch_geometric"),
    ),
    "frontends/dgl": Layer(
        (*CORE, "shardpass.connection", "shardpass.testing", "shardpass.frontends.dgl"),
        third_party=words("dgl"),
        lazy=words("networkx"),
    ),
    "frontends/sar": Layer(
        (
            *CORE,
            "shardpass.backends",
            "shardpass.data",
            "shardpass.frontends.dgl",
            "shardpass.frontends.sar",
        ),
        third_party=words("dgl"),
    ),
    "frontends": Layer(()),
    "planning": Layer(
        (*CORE, "shardpass.data", "shardpass.planning"),
        lazy_own=("shardpass.frontends",),  # of which a plan needs one, and either may be absent
    ),
    "testing": Layer(
        (*CORE, "shardpass.connection", "shardpass.data", "shardpass.testing"), lazy=words("torch_geometric dgl")
    ),
    "cli": Layer(("shardpass",), third_party=words("typer rich click"), lazy=OPTIONAL, lazy_own=("shardpass.cli",)),
    "": Layer(
        (
            "shardpass.backends",
            "shardpass.connection",
            "shardpass.core",
            "shardpass.data",
            "shardpass.errors",
            "shardpass.frontends",
            "shardpass.planning",
        )
    ),
}
"""By folder, the deepest one that fits. ``""`` is ``__init__.py``, ``connection.py`` and ``errors.py``.

``lazy_own`` of the command line: commands are imported when they run, since ``shardpass --help`` should not wait.
"""

HIDDEN: dict[str, str] = {
    "__init__.py": "shardpass.pyg and shardpass.dgl import PyG and DGL, so only when asked for",
    "backends/connect.py": "mpi4py is optional",
    "backends/processes.py": "torch may be built without torch.distributed",
    "core/kernels": "loops in numba and Triton are optional",
    "core/sampling": "loops in numba are optional",
    "data/streaming": "loops in numba are optional",
    "planning": "frontends are optional",
    "cli": "a command is imported when it runs",
}
"""Where modules of shardpass may be imported inside functions, and why. None of these opens a circle."""


def layer_of(path: Path) -> Layer:
    folder = path.relative_to(PACKAGE).parent.as_posix()
    found = [key for key in LAYERS if key and (folder == key or folder.startswith(key + "/"))]
    if not found and folder != ".":
        raise AssertionError(f"{folder} is a new folder: say in tests/test_layering.py what it may import")
    return LAYERS[max(found, key=len, default="")]


def required(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The packages given to `errors.require`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "require" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.split(".")[0], node.lineno


def fits(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def overstepped(path: Path) -> Iterator[str]:
    """What a module imports or requires that its layer does not allow."""
    layer = layer_of(path)
    for module, line, inside in imports(parse(path)):
        package = module.split(".")[0]
        if package in sys.stdlib_module_names or package in REQUIRED:
            continue
        if package == "shardpass":
            allowed = fits(module, layer.own) or (inside and fits(module, layer.lazy_own))
        else:
            allowed = package in layer.third_party or (inside and package in layer.lazy)
        if not allowed:
            yield f"{name_of(path)}:{line} imports {module}{' inside a function' if inside else ''}"
    for package, line in required(parse(path)):
        if package not in layer.third_party | layer.lazy:
            yield f"{name_of(path)}:{line} requires {package}"


def found_in_modules(find: Callable[[Path], Iterable[str]]) -> list[str]:
    """What `find` tells of all modules. One test for all of them: a test for each takes far longer than the reading."""
    return [problem for path in modules() for problem in find(path)]


def test_imports_keep_to_the_layers() -> None:
    assert not found_in_modules(overstepped)


def test_nothing_imports_the_command_line() -> None:
    def find(path: Path) -> Iterator[str]:
        for module, line, _ in imports(parse(path)):
            if fits(module, ("shardpass.cli",)) and not path.is_relative_to(PACKAGE / "cli"):
                yield f"{name_of(path)}:{line} imports {module}"

    assert not found_in_modules(find)


def test_optional_packages_are_imported_where_used() -> None:
    def find(path: Path) -> Iterator[str]:
        for module, line, inside in imports(parse(path)):
            if not inside and module.split(".")[0] in OPTIONAL - layer_of(path).third_party:
                yield f"{name_of(path)}:{line} imports {module} at module level"

    assert not found_in_modules(find)


def test_rooms_of_the_engine_are_imported_by_name() -> None:
    """Other packages and other rooms import ``shardpass.core.ROOM``, never a file inside it."""

    def find(path: Path) -> Iterator[str]:
        own = path.relative_to(PACKAGE).parts[1] if path.is_relative_to(PACKAGE / "core") else None
        for module, line, _ in imports(parse(path)):
            parts = module.split(".")
            if parts[:2] == ["shardpass", "core"] and len(parts) > 3 and parts[2] != own:
                yield f"{name_of(path)}:{line} imports {module}"

    assert not found_in_modules(find)


def test_rooms_import_lower_rooms_only() -> None:
    order = list(ROOMS)
    folders = {path.name for path in (PACKAGE / "core").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(order)
    for number, name in enumerate(order):
        assert set(ROOMS[name].split()) <= set(order[:number]), f"{name} imports a room that is not below it"


def test_a_room_says_what_it_is() -> None:
    for name in ROOMS:
        tree = parse(PACKAGE / "core" / name / "__init__.py")
        assert ast.get_docstring(tree), f"core/{name} has no docstring"
        exported = [n for n in tree.body if isinstance(n, ast.Assign) and dotted(n.targets[0]) == "__all__"]
        assert len(exported) == 1, f"core/{name} does not say what it exports"


def test_no_import_is_hidden() -> None:
    def find(path: Path) -> Iterator[str]:
        tree, name = parse(path), name_of(path)
        if any(name == where or name.startswith(where + "/") for where in HIDDEN):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and is_type_checking(node):
                yield f"{name}:{node.lineno} imports under TYPE_CHECKING"
        for module, line, inside in imports(tree):
            if inside and module.startswith("shardpass."):
                yield f"{name}:{line} imports {module} inside a function"

    assert not found_in_modules(find)


def module_graph() -> dict[str, set[str]]:
    """Which modules of shardpass each of them imports, in functions too."""
    names = {}
    for path in modules():
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardpass":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[name].add(full if full in names else str(node.module))
    # A package's __init__ collects the names of its own modules, which do not import it back by a name.
    return {name: {other for other in found if other != name and other in names} for name, found in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_there_are_no_circles_of_imports() -> None:
    assert not circles(module_graph())


def test_circles_are_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
