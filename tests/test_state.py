"""What a value is and where things are kept: no state in modules, typed fields, communicators of tensors and ranks."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source import PACKAGE, dotted, is_type_checking, modules, name_of, parse, words

MUTATORS = words("append add update setdefault pop popitem clear extend insert remove discard sort reverse __setitem__")

SAFE_CALLS = words(
    "frozenset set tuple list dict range len sorted TypeVar NamedTuple namedtuple NewType ParamSpec Path timedelta "
    "MappingProxyType property cast getattr slice struct.Struct re.compile "
    "torch.iinfo torch.finfo torch.device torch.Size"
)
"""What may be called while a module is imported: these make values and do no more."""

SAFE_METHODS = words("split union keys values items union encode format join")


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


def test_fields_have_types() -> None:
    core = [path for path in modules() if path.is_relative_to(PACKAGE / "core")]
    found = [field for path in core for field in any_fields(path)]
    assert not found, f"fields typed Any: {found}"


def test_a_communicator_is_tensors_and_ranks() -> None:
    """What the engine keeps of a run is on `core.ranks.Ranks`, which has a communicator."""
    tree = parse(PACKAGE / "backends" / "communicator.py")
    (protocol,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Communicator")
    fields = {dotted(n.target): ast.unparse(n.annotation) for n in protocol.body if isinstance(n, ast.AnnAssign)}
    assert set(fields) == words(
        "rank size device local_ranks processes shares_memory serves_threads collectives bytes_sent"
    )
    assert set(fields.values()) <= {"int", "bool", "torch.device", "tuple[int, ...]"}


def test_nothing_is_kept_on_a_communicator() -> None:
    """Attributes of `Ranks` may be set; others, and those of its `inner`, are not for the engine's things."""
    found = [
        told
        for path in modules()
        if not path.is_relative_to(PACKAGE / "backends") and path.name != "ranks.py"
        for told in kept_on_a_communicator(path)
    ]
    assert not found, f"something is kept on a communicator: {found}"


def kept_on_a_communicator(path: Path) -> Iterator[str]:
    known = attributes_of_ranks()
    for node in ast.walk(parse(path)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
            if isinstance(target, ast.Attribute):
                owner = dotted(target.value).split(".")[-1]
                if (owner == "inner" and target.attr not in ("device", "max_message_bytes")) or (
                    owner in ("comm", "ranks") and target.attr not in known
                ):
                    yield f"{name_of(path)}:{node.lineno} {ast.unparse(target)}"
        is_set = isinstance(node, ast.Call) and dotted(node.func) == "setattr" and bool(node.args)
        if is_set and dotted(node.args[0]).split(".")[-1] in ("comm", "ranks", "inner"):
            yield f"{name_of(path)}:{node.lineno} setattr"


@cache
def attributes_of_ranks() -> set[str]:
    tree = parse(PACKAGE / "core" / "ranks" / "ranks.py")
    (ranks,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Ranks")
    (made,) = (n for n in ranks.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    targets = [t for n in ast.walk(made) for t in getattr(n, "targets", [getattr(n, "target", None)])]
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and not t.attr.startswith("_")} - {"inner"}


# ---- no state in modules, no work at import


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


def test_modules_hold_no_state() -> None:
    problems = {name_of(path): state_problems(path) for path in modules()}
    assert not any(problems.values()), {name: found for name, found in problems.items() if found}


def test_constants_are_not_changed() -> None:
    problems = [problem for path in modules() for problem in changed_constants(path)]
    assert not problems, f"constants are changed: {problems}"


def changed_constants(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Global):
            yield f"{where} global {', '.join(node.names)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = dotted(node.func.value)
            if owner.split(".")[-1].strip("_").isupper() and owner[:1] != "?":
                yield f"{where} {owner}.{node.func.attr}()"
        written = [*getattr(node, "targets", []), getattr(node, "target", None)]
        for target in written if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)) else ():
            if isinstance(target, ast.Subscript) and dotted(target.value).split(".")[-1].strip("_").isupper():
                yield f"{where} an item of {dotted(target.value)} is written"


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
