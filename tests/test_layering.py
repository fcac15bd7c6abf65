"""Who may import whom, and no state in modules: an AST walk over the package. See docs/design.md, "Layout"."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardpass"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPTIONAL = words(
    "torch_geometric dgl mpi4py numba pymetis safetensors typer rich click matplotlib sklearn scipy pandas pyarrow ogb "
    "tqdm networkx triton"
)
"""Packages that may be absent. Imported at module level only where `Layer.third_party` says so."""

MUTATORS = words("append add update setdefault pop popitem clear extend insert remove discard sort reverse __setitem__")

SAFE_CALLS = words(
    "frozenset set tuple list dict range len sorted TypeVar NamedTuple namedtuple NewType ParamSpec Path timedelta "
    "MappingProxyType property cast getattr slice struct.Struct re.compile "
    "torch.iinfo torch.finfo torch.device torch.Size"
)
"""What may be called while a module is imported: these make values and do no more."""
SAFE_METHODS = words("split union keys values items union encode format join")


@dataclass(frozen=True)
class Layer:
    """What the modules of one folder may import.

    Args:
        own: prefixes of shardpass modules.
        third_party: packages besides torch, numpy and the standard library, at module level too.
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
    "sharding": "ranks",
    "training": "ranks",
    "exchange": "ranks sharding",
    "tracing": "ranks sharding",
    "kernels": "ranks sharding tracing",
    "memory": "ranks tracing",
    "graphs": "ranks sharding exchange",
    "aggregation": "ranks sharding training exchange tracing kernels",
    "sampling": "ranks sharding exchange kernels graphs",
    "inference": "ranks sharding training graphs",
    "selfcheck": "ranks sharding tracing graphs",
    "wrapping": "ranks training memory selfcheck",
    "dryrun": "ranks sharding training exchange kernels graphs",
}
"""The rooms of ``core/`` from the lowest to the highest, and the rooms that each may import."""


def room(name: str) -> Layer:
    """The layer of one room of ``core/``."""
    own = tuple(f"shardpass.core.{other}" for other in (name, *ROOMS[name].split()))
    if name == "kernels":
        return Layer((*BASE, *own), third_party=words("numba llvmlite triton"))
    if name == "sampling":
        return Layer((*BASE, *own), third_party=words("numba"))
    return Layer((*BASE, *own), lazy=words("safetensors"))


LAYERS: dict[str, Layer] = {
    **{f"core/{name}": room(name) for name in ROOMS},
    "core": Layer(()),
    "backends": Layer(("shardpass.errors", "shardpass.backends"), lazy=words("mpi4py")),
    "data": Layer(
        (*CORE, "shardpass.data"),
        third_party=words("safetensors"),
        lazy=words("pymetis torch_geometric safetensors pyarrow pandas ogb"),
    ),
    "data/streaming": Layer((*CORE, "shardpass.data"), third_party=words("numba")),
    "frontends/pyg": Layer(
        (*CORE, "shardpass.testing", "shardpass.frontends.pyg"), third_party=words("torch_geometric")
    ),
    "frontends/dgl": Layer((*CORE, "shardpass.testing", "shardpass.frontends.dgl"), third_party=words("dgl")),
    "frontends/sar": Layer(
        (
            *CORE,
            "shardpass.connection",
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

ANY_FIELDS: dict[str, str] = {}
"""Fields that may be typed ``Any``, as ``"file.py Class.field"``, and why no type could be named."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> Layer:
    folder = path.relative_to(PACKAGE).parent.as_posix()
    found = [key for key in LAYERS if key and (folder == key or folder.startswith(key + "/"))]
    if not found and folder != ".":
        raise AssertionError(f"{folder} is a new folder: say in tests/test_layering.py what it may import")
    return LAYERS[max(found, key=len, default="")]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """``(module, line, inside a function)`` of every import; ``from shardpass import x`` counts as shardpass.x."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                if child.module == "shardpass":
                    yield from ((f"shardpass.{alias.name}", child.lineno, inside) for alias in child.names)
                else:
                    yield child.module or "", child.lineno, inside
            else:
                yield from visit(
                    child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                )

    yield from visit(tree, False)


def required(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The packages given to `errors.require`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "require" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.split(".")[0], node.lineno


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def fits(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_keep_to_the_layers(path: Path) -> None:
    layer, problems = layer_of(path), []
    for module, line, inside in imports(parse(path)):
        package = module.split(".")[0]
        if package in sys.stdlib_module_names or package in ("torch", "numpy"):
            continue
        if package == "shardpass":
            allowed = fits(module, layer.own) or (inside and fits(module, layer.lazy_own))
        else:
            allowed = package in layer.third_party or (inside and package in layer.lazy)
        if not allowed:
            problems.append(f"line {line}: imports {module}{' inside a function' if inside else ''}")
    problems += [
        f"line {line}: requires {package}"
        for package, line in required(parse(path))
        if package not in layer.third_party | layer.lazy
    ]
    assert not problems, f"{name_of(path)} oversteps its layer: {problems}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_imports_the_command_line(path: Path) -> None:
    if path.is_relative_to(PACKAGE / "cli"):
        return
    found = [line for module, line, _ in imports(parse(path)) if fits(module, ("shardpass.cli",))]
    assert not found, f"{name_of(path)} imports the command line in lines {found}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_optional_packages_are_imported_where_used(path: Path) -> None:
    allowed = layer_of(path).third_party
    found = [
        f"line {line}: {module}"
        for module, line, inside in imports(parse(path))
        if not inside and module.split(".")[0] in OPTIONAL - allowed
    ]
    assert not found, f"{name_of(path)} imports optional packages at module level: {found}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_rooms_of_the_engine_are_imported_by_name(path: Path) -> None:
    """Other packages and other rooms import ``shardpass.core.ROOM``, never a file inside it."""
    own = path.relative_to(PACKAGE).parts[1] if path.is_relative_to(PACKAGE / "core") else None
    found = []
    for module, line, _ in imports(parse(path)):
        parts = module.split(".")
        if parts[:2] == ["shardpass", "core"] and len(parts) > 3 and parts[2] != own:
            found.append(f"line {line}: {module}")
    assert not found, f"{name_of(path)} imports files of other rooms: {found}"


def test_rooms_import_lower_rooms_only() -> None:
    order = list(ROOMS)
    folders = {path.name for path in (PACKAGE / "core").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(order)
    for number, name in enumerate(order):
        assert set(ROOMS[name].split()) <= set(order[:number]), f"{name} imports a room that is not below it"


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_it_is(name: str) -> None:
    tree = parse(PACKAGE / "core" / name / "__init__.py")
    assert ast.get_docstring(tree), f"core/{name} has no docstring"
    exported = [n for n in tree.body if isinstance(n, ast.Assign) and dotted(n.targets[0]) == "__all__"]
    assert len(exported) == 1


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_import_is_hidden(path: Path) -> None:
    tree, name = parse(path), name_of(path)
    checked = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.If) and is_type_checking(node)]
    hidden = [line for module, line, inside in imports(tree) if inside and module.startswith("shardpass.")]
    if not any(name == where or name.startswith(where + "/") for where in HIDDEN):
        assert not checked, f"{name} imports under TYPE_CHECKING in lines {checked}"
        assert not hidden, f"{name} imports modules of shardpass inside functions in lines {hidden}"


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


# ---- what a value is, and where things are kept


def any_fields(path: Path) -> list[str]:
    """Annotated fields of classes that are typed ``Any``."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and "Any" in ast.unparse(item.annotation).split(" | "):
                    found.append(f"{name_of(path)} {node.name}.{ast.unparse(item.target)}")
    return found


@pytest.mark.parametrize("path", [p for p in modules() if p.is_relative_to(PACKAGE / "core")], ids=name_of)
def test_fields_have_types(path: Path) -> None:
    found = [field for field in any_fields(path) if field not in ANY_FIELDS]
    assert not found, f"fields typed Any: {found}"


def test_a_communicator_is_tensors_and_ranks() -> None:
    """What the engine keeps of a run is on `core.ranks.Ranks`, which has a communicator."""
    tree = parse(PACKAGE / "backends" / "communicator.py")
    (protocol,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Communicator")
    fields = {dotted(n.target): ast.unparse(n.annotation) for n in protocol.body if isinstance(n, ast.AnnAssign)}
    assert set(fields) == words("rank size device local_ranks shares_memory serves_threads bytes_sent")
    assert set(fields.values()) <= {"int", "bool", "torch.device", "tuple[int, ...]"}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_is_kept_on_a_communicator(path: Path) -> None:
    """Attributes of `Ranks` may be set; others, and those of its `inner`, are not for the engine's things."""
    if path.is_relative_to(PACKAGE / "backends") or path.name == "ranks.py":
        return
    known = attributes_of_ranks()
    found = []
    for node in ast.walk(parse(path)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
            if isinstance(target, ast.Attribute):
                owner = dotted(target.value).split(".")[-1]
                if (owner == "inner" and target.attr not in ("device", "max_message_bytes")) or (
                    owner in ("comm", "ranks") and target.attr not in known
                ):
                    found.append(f"line {node.lineno}: {ast.unparse(target)}")
        is_set = isinstance(node, ast.Call) and dotted(node.func) == "setattr" and bool(node.args)
        if is_set and dotted(node.args[0]).split(".")[-1] in ("comm", "ranks", "inner"):
            found.append(f"line {node.lineno}: setattr")
    assert not found, f"{name_of(path)} keeps something on a communicator: {found}"


def attributes_of_ranks() -> set[str]:
    tree = parse(PACKAGE / "core" / "ranks" / "ranks.py")
    (ranks,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Ranks")
    (made,) = (n for n in ranks.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    targets = [t for n in ast.walk(made) for t in getattr(n, "targets", [getattr(n, "target", None)])]
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and not t.attr.startswith("_")} - {"inner"}


# ---- no state in modules, no work at import


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


def is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and dotted(node.test.left) == "__name__"


def is_require(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) == "require"


def is_constant_name(name: str) -> bool:
    return name in ("__all__", "__version__") or name.strip("_").isupper()


def is_type_alias(name: str, value: ast.expr | None) -> bool:
    """``Mode = Literal[...]``, ``State = list[Tensor]``, ``T = TypeVar("T")``: a CamelCase name for a type."""
    made = isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in ("TypeVar", "NewType", "ParamSpec")
    return name.lstrip("_")[:1].isupper() and (
        made or isinstance(value, (ast.Subscript, ast.Name, ast.Attribute, ast.BinOp))
    )


def called(value: ast.AST) -> Iterator[ast.Call]:
    """Calls that run when `value` is evaluated; those inside a lambda do not."""
    if isinstance(value, ast.Lambda):
        return
    if isinstance(value, ast.Call):
        yield value
    for child in ast.iter_child_nodes(value):
        yield from called(child)


def is_safe_call(call: ast.Call, own_classes: set[str]) -> bool:
    name = dotted(call.func)
    if name in SAFE_CALLS or name in own_classes:
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in SAFE_METHODS


def state_problems(path: Path) -> list[str]:
    tree = parse(path)
    own_classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    is_cli = path.is_relative_to(PACKAGE / "cli")
    problems = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if is_type_checking(node) or is_main(node) or is_require(node):
            continue
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            if not (is_cli and isinstance(node, ast.Expr)):  # typer registers its commands by calls
                problems.append(f"line {node.lineno}: a {type(node).__name__} statement runs at import")
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        made_by_typer = isinstance(node.value, ast.Call) and dotted(node.value.func).startswith("typer.")
        if is_cli and made_by_typer:
            continue
        for name in names:
            if not (is_constant_name(name) or is_type_alias(name, node.value)):
                problems.append(f"line {node.lineno}: {name!r} looks like state; constants are UPPER_CASE")
        for call in called(node.value) if node.value is not None else ():
            if not is_safe_call(call, own_classes) and not all(is_type_alias(name, node.value) for name in names):
                problems.append(f"line {node.lineno}: {dotted(call.func)}() is called at import")
    return problems


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_hold_no_state(path: Path) -> None:
    problems = state_problems(path)
    assert not problems, f"{name_of(path)}: {problems}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_constants_are_not_changed(path: Path) -> None:
    tree, problems = parse(path), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            problems.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = dotted(node.func.value)
            if owner.split(".")[-1].strip("_").isupper() and owner[:1] != "?":
                problems.append(f"line {node.lineno}: {owner}.{node.func.attr}()")
        written = [*getattr(node, "targets", []), getattr(node, "target", None)]
        for target in written if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)) else ():
            if isinstance(target, ast.Subscript) and dotted(target.value).split(".")[-1].strip("_").isupper():
                problems.append(f"line {node.lineno}: an item of {dotted(target.value)} is written")
    assert not problems, f"{name_of(path)} changes a constant: {problems}"


# ---- the rules themselves notice what they should


@pytest.mark.parametrize(
    "text, told",
    [
        ("registry = {}", "looks like state"),
        ("THREAD = threading.Thread(target=print)", "threading.Thread() is called"),
        ("os.environ['A'] = 'b'", "a Subscript"),
        ("logging.basicConfig()", "Expr statement"),
        ("for i in range(3):\n    pass", "For statement"),
        ("VALUE = os.environ.get('A')", "os.environ.get() is called"),
    ],
)
def test_state_is_noticed(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    problems = state_problems(path)
    assert problems, text
    if "Subscript" not in told:
        assert told in problems[0]


@pytest.mark.parametrize("text", ["A = 1", "_B = frozenset('a b'.split())", "T = TypeVar('T')", "State = list[int]"])
def test_constants_are_allowed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert not state_problems(path)
