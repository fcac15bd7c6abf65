"""The source of the package as syntax trees, for the tests that hold its rules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardpass"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


@cache
def imports(tree: ast.Module) -> list[tuple[str, int, bool]]:
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

    return list(visit(tree, False))
