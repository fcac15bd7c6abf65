"""`shardpass inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from shardpass.cli.console import output
from shardpass.core.ranks import bytes_text
from shardpass.data import Report, inspect, inspect_layers, inspect_pairs, open_store
from shardpass.data import verify as verify_store

_MOST_PAIRS = 8  # ranks whose table fits a screen
_QUANTITIES = ("num_nodes", "num_edges", "num_halo_rows", "num_cut_edges", "num_bytes")


def run_inspect(store: str, ranks: int | None, verify: bool) -> None:
    """Print a table of the parts or ranks of a store; check all bytes first if asked to."""
    console = output()
    if verify:
        with console.status("verifying"):
            manifest = verify_store(store)
        console.print(f"verified: every byte of {manifest.num_parts} part files is as written")
    report = inspect(store, ranks)
    # a store says who made it, and may have come from anywhere: no markup, no sequences for the terminal
    console.print("".join(c if c.isprintable() or c == "\n" else "?" for c in _heading(report)), markup=False)
    console.print(report_table(report))


def run_inspect_layers(store: str, ranks: int | None, mask: str, num_layers: int) -> None:
    """Print what each layer needs for the nodes of `mask`, beside what it needs for all nodes."""
    manifest = open_store(store).manifest
    whole = inspect(store, ranks)
    all_nodes, all_edges = sum(manifest.num_nodes.values()), sum(manifest.num_edges.values())
    table = Table(title=f"graph.layers(graph.{mask}, {num_layers})")
    for title in ("layer", "nodes", "edges", "halo rows"):
        table.add_column(title, justify="right")
    for number, layer in enumerate(inspect_layers(store, mask, num_layers, ranks)):
        pairs = ((layer.nodes, all_nodes), (layer.edges, all_edges), (layer.halo_rows, whole.num_halo_rows))
        table.add_row(str(number), *(f"{part:,} ({part / max(1, total):.1%})" for part, total in pairs))
    output().print(table)


def run_inspect_pairs(store: str, ranks: int | None) -> None:
    """Print the rows that each rank fetches from each other one, and how many fewer partial sums make that."""
    halo, fewest = inspect_pairs(store, ranks)
    console = output()
    if len(halo) <= _MOST_PAIRS:
        table = Table(title="rows of a layer that a rank fetches, and with Options(partial_sums=True)")
        for title in ("rank", *(f"from {owner}" for owner in range(len(halo)))):
            table.add_column(title, justify="right")
        for rank, (rows, fewer) in enumerate(zip(halo.tolist(), fewest.tolist())):
            table.add_row(str(rank), *(_with_fewer(*pair) if pair[0] else "" for pair in zip(rows, fewer)))
        console.print(table)
    console.print(f"rows per layer, and with partial sums: {_with_fewer(int(halo.sum()), int(fewest.sum()))}")


def _with_fewer(rows: int, fewer: int) -> str:
    return f"{rows:,} → {fewer:,} ({fewer / max(1, rows) - 1:.0%})"


def _heading(report: Report) -> str:
    manifest = report.manifest
    edges = sum(manifest.num_edges.values())
    fields = [*_fields(manifest.node_fields), *_fields(manifest.edge_fields)]
    return (
        f"{report.path}: {sum(manifest.num_nodes.values()):,} nodes, {edges:,} edges, {manifest.num_parts} parts by "
        f"{manifest.method} (seed {manifest.seed}), from {manifest.source}\n"
        f"fields: {', '.join(fields) or 'none'}\n"
        + "".join(f"{line}\n" for line in manifest.column_lines())
        + f"cut edges: {report.num_cut_edges:,} ({report.num_cut_edges / max(1, edges):.1%}); rows fetched per layer: "
        f"{report.num_halo_rows:,}"
    )


def _fields(by_type: Mapping[Any, Mapping[str, object]]) -> list[str]:
    several = len(by_type) > 1
    return [
        f"{kind if isinstance(kind, str) else '__'.join(kind)}.{name}" if several else name
        for kind, fields in by_type.items()
        for name in fields
    ]


def report_table(report: Report) -> Table:
    """One row per part or rank, then the balance (largest over mean) of each column."""
    by_rank = report.ranks is not None
    table, first = Table(), ["rank", "parts"] if by_rank else ["part"]
    for title in (*first, "nodes", "edges", "halo rows", "cut edges", "bytes"):
        table.add_column(title, justify="right")
    for number, group in enumerate(report.groups):
        span = [f"{group.parts.start}-{group.parts.stop - 1}" if len(group.parts) > 1 else f"{group.parts.start}"]
        counts = [f"{getattr(group, name):,}" for name in _QUANTITIES[:-1]]
        table.add_row(str(number), *(span if by_rank else []), *counts, bytes_text(group.num_bytes))
    table.add_section()
    balances = [f"{report.balance(name):.2f}" for name in _QUANTITIES]
    table.add_row("balance", *([""] if by_rank else []), *balances)
    return table
