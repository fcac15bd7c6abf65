"""How the tables of layers are written: lists of classes by how they are computed, and rows by reason."""

from collections import defaultdict
from collections.abc import Iterable


def lists_of_layers(found: list[tuple[str, str, float]]) -> str:
    """Lists of ``(name, how, error)``, one for each way: the classes with their variants and largest errors."""
    grouped: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, how, error in found:
        kind, _, variant = name.partition(" ")
        grouped[how][kind].append((variant, error))
    lists = []
    for how, kinds in grouped.items():
        items = "\n".join(f"* {_named(kind, kinds[kind])}" for kind in sorted(kinds, key=str.lower))
        lists.append(f"## {how[0].upper()}{how[1:]}\n\n{items}")
    return "\n\n".join(lists)


def _named(kind: str, variants: list[tuple[str, float]]) -> str:
    largest = f"{max(error for _, error in variants):.0e}"
    if len(variants) == 1:
        return f"{kind} {variants[0][0]}".strip() + f": {largest}"
    return f"{kind} ({', '.join(variant or 'default' for variant, _ in variants)}): {largest}"


def rows_by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Table rows of ``(class, reason)``: one for each reason."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons:
        grouped[reason].append(name)
    return [f"| {', '.join(names)} | {reason} |" for reason, names in grouped.items()]
