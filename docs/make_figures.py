"""Write the figures of the documentation: ``python docs/make_figures.py``. Plain SVG, the same bytes every time.

A figure is 520 wide and its letters are 16 high, so they can be read on a phone. Colours are classes, which have other
values where the reader prefers dark.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "figures"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "reports" / "bars-2026-11-28.json"
FONT = "font-family='Helvetica, Arial, sans-serif'"
WIDTH, SMALL = 520, 16
COLOURS = {
    "page": ("#ffffff", "#14171d"),
    "ink": ("#222222", "#e6e6e6"),
    "faint": ("#5f5f5f", "#a8a8a8"),
    "own": ("#c6dbef", "#1f4e79"),
    "first": ("#fdd0a2", "#7a4a12"),
    "second": ("#c7e9c0", "#2c5e33"),
    "bar": ("#3182bd", "#6baed6"),
    "other": ("#fdae6b", "#c97f2e"),
}
"""A class of fill and its colour, light and dark."""
BLOCKS = ("own", "first", "second")
ROUNDS = ("own", "round 1", "round 2")


def text(x: float, y: float, words: str, at: str = "start", kind: str = "ink", bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x:g}' y='{y:g}' font-size='{SMALL}' text-anchor='{at}' class='{kind}'{weight}>{words}</text>"


def box(x: float, y: float, width: float, height: float, kind: str, line: float = 0, dashed: bool = False) -> str:
    edge = f" class='{kind} edge' stroke-width='{line:g}'" if line else f" class='{kind}'"
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'{edge}{dashes}/>"


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' class='edge' stroke-width='2' marker-end='url(#head)'/>"
    )


def figure(height: int, title: str, body: list[str]) -> str:
    """The file: its title, its colours for light and dark, a background, and what is drawn on it."""
    light, dark = (
        "".join(
            f".{kind}{{fill:{pair[i]}}}.line.{kind}{{fill:none;stroke:{pair[i]}}}" for kind, pair in COLOURS.items()
        )
        + f".edge{{stroke:{COLOURS['ink'][i]}}}"
        for i in (0, 1)
    )
    head = "<marker id='head' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}' "
        f"{FONT} role='img'>",
        f"<title>{title}</title>",
        f"<style>{light} @media (prefers-color-scheme: dark) {{{dark}}}</style>",
        f"<defs>{head}<path d='M0,0 L8,4 L0,8 z' class='ink'/></marker></defs>",
        box(0, 0, WIDTH, height, "page"),
        *body,
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def shards() -> str:
    """The adjacency matrix, cut by the owners of sources and destinations; dots are edges."""
    left, top, side = 148, 78, 116
    out = [text(left + 1.5 * side, 24, "source nodes, by owner", "middle", "faint")]
    for rank in range(3):
        out.append(text(left + (rank + 0.5) * side, 58, f"rank {rank}", "middle", bold=True))
        out.append(text(left - 14, top + (rank + 0.5) * side + 6, f"rank {rank}", "end", bold=True))
        for owner in range(3):
            x, y, distance = left + owner * side, top + rank * side, (rank - owner) % 3
            out.append(box(x, y, side, side, BLOCKS[distance], line=2))
            out.append(text(x + side / 2, y + side - 14, ROUNDS[distance], "middle"))
            for i in range(7 if distance == 0 else 4):
                across, down = (37 * i + 29 * owner + 11 * rank) % 92, (23 * i + 17 * rank + 5 * owner) % 66
                out.append(f"<circle cx='{x + 12 + across}' cy='{y + 12 + down}' r='3' class='ink'/>")
    middle = top + 1.5 * side
    turned = text(26, middle, "destination nodes, by owner", "middle", "faint")
    out.append(turned.replace("<text ", f"<text transform='rotate(-90 26 {middle:g})' ", 1))
    out.append(text(WIDTH / 2, top + 3 * side + 34, "Every edge is a dot in exactly one of the nine blocks.", "middle"))
    return figure(478, "The edges of three ranks: nine blocks of the adjacency matrix", out)


def rounds() -> str:
    """What rank 0 has in memory at each step, and how much of its sum is made."""
    left, column, out = 116, 134, []
    steps = (("own shard", None, 2), ("round 1", 2, 1), ("round 2", 1, None))  # who is here, who is under way
    for row, words in ((76, "rows"), (100, "in memory"), (204, "edges"), (228, "used"), (284, "sum"), (308, "so far")):
        out.append(text(8, row, words, kind="faint"))
    for i, (name, here, coming) in enumerate(steps):
        x = left + i * column
        out.append(text(x + 62, 30, name, "middle", bold=True))
        out += [box(x, 52, 124, 28, "own", 1), text(x + 62, 72, "own rows", "middle")]
        for y, rank, dashed in ((86, here, False), (120, coming, True)):
            if rank is not None:
                kind = BLOCKS[-rank % 3]
                out += [box(x, y, 124, 28, "page" if dashed else kind, 1, dashed)]
                out += [text(x + 62, y + 20, f"of rank {rank}", "middle")]
        for owner, distance in ((0, 0), (1, 2), (2, 1)):
            used = distance == i
            out.append(
                box(x + 42 * owner, 190, 40, 40, BLOCKS[distance] if used else "page", 2 if used else 1, not used)
            )
        out.append(box(x, 270, 124, 36, "page", 1))
        out += [box(x + 42 * part, 271, 40, 34, BLOCKS[part]) for part in range(i + 1)]
    out.append(text(WIDTH / 2, 346, "Dashed rows are under way while a round is computed.", "middle"))
    out.append(text(WIDTH / 2, 370, "In mode sar each round drops the rows of the one before.", "middle"))
    return figure(390, "Forward on rank 0: its own shard, then one round for each other owner", out)


def softmax() -> str:
    """One node with five in-edges, in three blocks: the running maximum, sum and weighted mean."""
    blocks = [[(1.0, 2.0), (3.0, 1.0)], [(2.0, 4.0)], [(4.0, 3.0), (0.0, 5.0)]]  # (score, value) of each edge
    out, seen = [], list[tuple[float, float]]()
    columns = (112, 228, 338, 458)
    for x, words, more in zip(columns, ("scores", "maximum", "sum", "result"), ("of the block", "m", "l", "o")):
        out += [text(x, 28, words, "middle", bold=True), text(x, 50, more, "middle", "faint")]
    most = total = mean = 0.0
    for i, block in enumerate(blocks):
        old, seen = most if seen else -math.inf, [*seen, *block]
        most = max(old, *(score for score, _ in block))
        carried = total * math.exp(old - most)  # what was summed under the old maximum, under the new one
        grown = carried + sum(math.exp(score - most) for score, _ in block)
        mean = (mean * carried + sum(math.exp(score - most) * value for score, value in block)) / grown
        total, y = grown, 72 + 62 * i
        out.append(box(8, y, WIDTH - 16, 48, BLOCKS[i], 1))
        out.append(text(16, y + 30, ROUNDS[i]))
        numbers = (", ".join(f"{score:g}" for score, _ in block), f"{most:g}", f"{total:.4f}", f"{mean:.4f}")
        out += [text(x, y + 30, words, "middle") for x, words in zip(columns, numbers)]
    highest = max(score for score, _ in seen)
    weights = [math.exp(score - highest) for score, _ in seen]
    whole = sum(weight * value for weight, (_, value) in zip(weights, seen)) / sum(weights)
    numbers = ("all five", f"{highest:g}", f"{sum(weights):.4f}", f"{whole:.4f}")
    out.append(box(8, 270, WIDTH - 16, 48, "page", 2))
    out.append(text(16, 300, "whole"))
    out += [text(x, 300, words, "middle", bold=True) for x, words in zip(columns, numbers)]
    assert math.isclose(whole, mean, rel_tol=1e-12)
    out.append(text(WIDTH / 2, 352, "A new maximum rescales the sum: l &#215; exp(old m &#8722; new m).", "middle"))
    return figure(372, "A softmax over five in-edges, block by block, ends where the whole softmax does", out)


def push_and_pull() -> str:
    """Who sends what in backward, one way and the other."""
    out: list[str] = []
    ways = {
        "push": (["1. source rows", "3. their gradients"], ["2. goes over", "its in-edges"], []),
        "pull": (["1. what was published"], [], ["2. goes over", "its out-edges"]),
    }
    for i, (name, (sent, at_destination, at_source)) in enumerate(ways.items()):
        top = 26 + 190 * i
        out.append(text(8, top, f"backward=&#34;{name}&#34;", bold=True))
        for x, kind, words, work in (
            (8, "own", ["owner of the", "sources"], at_source),
            (374, "first", ["owner of the", "destinations"], at_destination),
        ):
            out.append(box(x, top + 16, 138, 126, kind, 1))
            out += [text(x + 69, top + 42 + 22 * j, line, "middle") for j, line in enumerate(words)]
            out += [text(x + 69, top + 102 + 22 * j, line, "middle", bold=True) for j, line in enumerate(work)]
        for j, words in enumerate(sent):
            y, to_the_right = top + 62 + 58 * j, name == "push" and j == 0
            out.append(arrow(152, y, 368, y) if to_the_right else arrow(368, y, 152, y))
            out.append(text(260, y - 10, words, "middle"))
    return figure(
        374, "Backward: push fetches source rows and returns gradients; pull fetches what destinations publish", out
    )


def measured() -> dict[str, tuple[float, float]]:
    """GAT on 20,000 nodes and 3 million edges: by what runs it, CPU seconds of an epoch, bytes of the largest rank."""
    records = json.loads(MEASURED.read_text())["records"]
    found: dict[tuple[str | None, int], list[dict[str, Any]]] = {
        (r["peer"], r["world"]): r["ranks"]
        for r in sorted(records, key=lambda r: r.get("in_memory", False))  # on one rank, the graph that is in memory
        if (r["graph"], r["model"]) == ("20k150", "gat")
    }
    shown = {"PyG": ("pyg", 1), "DGL": ("dgl", 1), "shardpass, 1 rank": (None, 1), "shardpass, 4 ranks": (None, 4)}
    return {
        name: (
            sum(rank["cpu_seconds"] for rank in found[key]),
            max(rank["kept_heap_bytes"] + rank["transient_bytes"] for rank in found[key]),
        )
        for name, key in shown.items()
    }


def bars(top: float, title: str, rows: dict[str, tuple[float, str]]) -> list[str]:
    """Horizontal bars with their values, to one scale."""
    left, length, out = 200, 226, [text(200, top, title, bold=True)]
    most = max(value for value, _ in rows.values())
    for i, (name, (value, words)) in enumerate(rows.items()):
        y, width, is_peer = top + 16 + 36 * i, max(3.0, round(length * value / most, 1)), name in ("PyG", "DGL")
        out.append(text(left - 12, y + 19, name, "end", bold=not is_peer))
        out += [box(left, y, width, 26, "other" if is_peer else "bar"), text(left + width + 8, y + 19, words)]
    return out


def beside_pyg() -> str:
    rows = measured()
    seconds = {name: (value, f"{value:.1f} s") for name, (value, _) in rows.items()}
    memory = {name: (b, f"{b / 1e9:.1f} GB" if b > 1e9 else f"{b / 1e6:.0f} MB") for name, (_, b) in rows.items()}
    told = ("An unmodified GAT, 20,000 nodes, 3 million edges,", "float32, one computing thread per process")
    body = [*bars(30, "Peak memory of a process", memory), *bars(226, "CPU time of an epoch, all ranks", seconds)]
    body += [text(WIDTH / 2, 424 + 24 * i, line, "middle", "faint") for i, line in enumerate(told)]
    return figure(466, "Memory and time of an epoch of GAT: PyG, DGL, and shardpass on one and on four ranks", body)


WAYS = {
    "whole 1": ("bar", "whole graph, 1 rank"),
    "whole 4": ("ink", "whole graph, 4 ranks"),
    "sampled ours": ("other", "samples, shardpass"),
    "sampled pyg": ("faint", "samples, PyG"),
}
"""How `benchmarks.worth_it` trains: the colour of the line, and words for it."""
LOWEST, HIGHEST = 0.8, 0.93


def curves(top: float, title: str, found: dict[str, Any]) -> list[str]:
    """Test accuracy at the best validation so far, over CPU seconds of all ranks."""
    left, right, low, high = 56, WIDTH - 16, top + 190, top + 16

    def place(seconds: float, accuracy: float) -> str:
        x = left + (right - left) * min(seconds / found["seconds"], 1)
        return f"{x:.1f},{low - (low - high) * (accuracy - LOWEST) / (HIGHEST - LOWEST):.1f}"

    out = [text(WIDTH / 2, top, title, "middle", bold=True)]
    for tick in (0.8, 0.85, 0.9):
        x, y = place(0, tick).split(",")
        out += [text(left - 8, float(y) + 5, f"{tick:.2f}", "end", "faint")]
        out += [f"<line x1='{x}' y1='{y}' x2='{right}' y2='{y}' class='line faint' stroke-width='0.5'/>"]
    for run in found["runs"]:
        best, points = (-1.0, 0.0), []
        for point in run["curve"]:
            best = max(best, (point["val"], point["test"]), key=lambda pair: pair[0])
            if best[1] >= LOWEST:
                points.append(place(point["cpu"], best[1]))
        out.append(f"<polyline points='{' '.join(points)}' class='line {WAYS[run['way']][0]}' stroke-width='2.5'/>")
    return out


def worth_it() -> str:
    reports = MEASURED.parent
    body, top = [], 24.0
    for kind, words in (("sage", "GraphSAGE, 4 layers"), ("gat", "GAT, 2 layers")):
        found = json.loads(max(reports.glob(f"worth-it-amazon-computers-{kind}-*.json")).read_text(encoding="utf-8"))
        body += curves(top, f"{words}: test accuracy over {found['seconds']:.0f} CPU seconds", found)
        top += 226
    for number, (kind, words) in enumerate(WAYS.values()):
        x, y = (20 + 260 * (number % 2), top - 6 + 26 * (number // 2))
        body += [f"<line x1='{x}' y1='{y - 5:g}' x2='{x + 28}' y2='{y - 5:g}' class='line {kind}' stroke-width='2.5'/>"]
        body += [text(x + 36, y, words)]
    return figure(int(top) + 36, "Test accuracy over CPU seconds: the whole graph beside sampled neighbourhoods", body)


FIGURES = {
    "shards.svg": shards,
    "rounds.svg": rounds,
    "softmax.svg": softmax,
    "push-and-pull.svg": push_and_pull,
    "beside-pyg.svg": beside_pyg,
    "worth-it.svg": worth_it,
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
