"""Write the figures of the documentation: ``python docs/make_figures.py``. Plain SVG, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "figures"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "reports" / "bars-2026-11-22.json"
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, FAINT = "#222222", "#999999"
OWN, FIRST, SECOND = "#c6dbef", "#fdd0a2", "#c7e9c0"
NUM_RANKS, PARTS_PER_RANK, CELL = 3, 2, 44


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "start", color: str = INK, bold: bool = False
) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}' fill='{color}'{weight}>{words}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = INK, line: float = 1) -> str:
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='{fill}' stroke='{stroke}' "
        f"stroke-width='{line}'/>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' marker-end='url(#head)'/>"


def matrix(left: float, top: float) -> list[str]:
    """The adjacency matrix: a row of blocks per rank, coloured by the round in which their sources are there."""
    out, side = [], PARTS_PER_RANK * CELL
    for rank in range(NUM_RANKS):
        for owner in range(NUM_RANKS):
            distance = (rank - owner) % NUM_RANKS
            x, y = left + owner * side, top + rank * side
            out.append(box(x, y, side, side, (OWN, FIRST, SECOND)[distance], line=2))
            out.append(text(x + side / 2, y + side / 2 + 1, ("own", "round 1", "round 2")[distance], 14, "middle"))
    for part in range(1, NUM_RANKS * PARTS_PER_RANK):
        if part % PARTS_PER_RANK:
            at, end = part * CELL, NUM_RANKS * side
            dashes = f"stroke='{FAINT}' stroke-dasharray='3 4'"
            out.append(f"<line x1='{left + at}' y1='{top}' x2='{left + at}' y2='{top + end}' {dashes}/>")
            out.append(f"<line x1='{left}' y1='{top + at}' x2='{left + end}' y2='{top + at}' {dashes}/>")
    for part in range(NUM_RANKS * PARTS_PER_RANK):
        out.append(text(left + (part + 0.5) * CELL, top - 8, f"part {part}", 10, "middle", FAINT))
        out.append(text(left - 8, top + (part + 0.5) * CELL + 4, f"part {part}", 10, "end", FAINT))
    for rank in range(NUM_RANKS):
        out.append(text(left + (rank + 0.5) * side, top - 24, f"rank {rank}", 13, "middle", bold=True))
        out.append(text(left - 48, top + (rank + 0.5) * side + 4, f"rank {rank}", 13, "end", bold=True))
    middle = top + NUM_RANKS * side / 2
    out.append(text(left + NUM_RANKS * side / 2, top - 46, "source node (column)", 12, "middle"))
    turned = text(left - 106, middle, "destination node (row)", 12, "middle")
    out.append(turned.replace("<text ", f"<text transform='rotate(-90 {left - 106} {middle})' ", 1))
    return out


def rank_view(left: float, top: float) -> list[str]:
    """How rank 0 numbers source rows, and what it does when."""
    out = [text(left, top, "Source rows of rank 0: own first, then halo rows by owner", 13, bold=True)]
    x = left
    for width, color, words in ((150, OWN, "own rows"), (90, SECOND, "halo of 1"), (110, FIRST, "halo of 2")):
        out += [box(x, top + 14, width, 30, color), text(x + width / 2, top + 34, words, 12, "middle")]
        x += width
    out.append(text(left, top + 62, "0", 11, "middle", FAINT))
    out.append(text(left + 150, top + 62, "num_own", 11, "middle", FAINT))
    out.append(text(left + 350, top + 62, "num_own + num_halo", 11, "end", FAINT))

    top += 108
    out.append(text(left, top, "Forward on rank 0: own shard, then one round per owner", 13, bold=True))
    rows = (("rows", top + 30), ("compute", top + 80))
    out += [text(left, y + 4, words, 12) for words, y in rows]
    start, width = left + 68, 98
    steps = (("own", "own shard", OWN), ("from rank 2", "round 1", FIRST), ("from rank 1", "round 2", SECOND))
    for i, (source, words, color) in enumerate(steps):
        x = start + i * (width + 6)
        out += [box(x, top + 15, width, 28, color), text(x + width / 2, top + 33, source, 12, "middle")]
        out += [box(x, top + 65, width, 28, color), text(x + width / 2, top + 83, words, 12, "middle")]
        out.append(arrow(x + width / 2, top + 43, x + width / 2, top + 64))
    told = (
        "While a round is computed, the rows of the next are under way.",
        "Mode sar drops rows after their round; backward fetches them",
        "again and returns the gradients of halo rows to their owners.",
    )
    out += [text(left, top + 122 + 18 * i, words, 12) for i, words in enumerate(told)]
    return out


def shards() -> str:
    body = [*matrix(150, 80), *rank_view(470, 50)]
    head = (
        "<defs><marker id='head' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>"
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 940 370' {FONT} role='img'>",
            "<title>Three ranks, six parts: shards are blocks of the adjacency matrix</title>",
            head,
            box(0, 0, 940, 370, "#ffffff", "none", 0),
            *body,
            "</svg>",
            "",
        ]
    )


def measured() -> dict[str, tuple[float, float]]:
    """GAT on 20,000 nodes and 3 million edges: by what runs it, CPU seconds of an epoch, bytes of the largest rank."""
    records = json.loads(MEASURED.read_text())["records"]
    found: dict[tuple[str | None, int], list[dict[str, Any]]] = {
        (r["peer"], r["world"]): r["ranks"] for r in records if (r["graph"], r["model"]) == ("20k150", "gat")
    }
    shown = {"PyG": ("pyg", 1), "DGL": ("dgl", 1), "shardpass, 1 rank": (None, 1), "shardpass, 4 ranks": (None, 4)}
    return {
        name: (
            sum(rank["cpu_seconds"] for rank in found[key]),
            max(rank["kept_heap_bytes"] + rank["transient_bytes"] for rank in found[key]),
        )
        for name, key in shown.items()
    }


def bars(left: float, title: str, rows: dict[str, tuple[float, str]], names: bool) -> list[str]:
    """Horizontal bars with their values, to one scale."""
    out, top, length = [text(left, 34, title, 15, bold=True)], 56, 240
    most = max(value for value, _ in rows.values())
    for i, (name, (value, words)) in enumerate(rows.items()):
        y, width, is_peer = top + 38 * i, max(3.0, round(length * value / most, 1)), name in ("PyG", "DGL")
        if names:
            out.append(text(left - 12, y + 18, name, 14, "end", bold=not is_peer))
        out += [
            box(left, y, width, 26, FIRST if is_peer else "#3182bd", "none"),
            text(left + width + 8, y + 18, words, 14),
        ]
    return out


def beside_pyg() -> str:
    rows = measured()
    seconds = {name: (value, f"{value:.1f} s") for name, (value, _) in rows.items()}
    memory = {name: (b, f"{b / 1e9:.1f} GB" if b > 1e9 else f"{b / 1e6:.0f} MB") for name, (_, b) in rows.items()}
    told = "An unmodified GAT, 20,000 nodes, 3 million edges, float32, one computing thread per process"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 250' {FONT} role='img'>",
            "<title>Memory and time of an epoch of GAT: PyG, DGL, and shardpass on one and on four ranks</title>",
            box(0, 0, 860, 250, "#ffffff", "none", 0),
            *bars(160, "Peak memory of a process", memory, True),
            *bars(520, "CPU time of an epoch, all ranks", seconds, False),
            text(430, 234, told, 13, "middle", "#666666"),
            "</svg>",
            "",
        ]
    )


FIGURES = {"shards.svg": shards, "beside-pyg.svg": beside_pyg}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
