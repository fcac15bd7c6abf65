"""The comparison as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.bars import cpu, heap, pick, sent, verdicts
from benchmarks.run import Record
from benchmarks.traffic import bytes_per_row

_HEADER = (
    "graph",
    "model",
    "system",
    "W",
    "CPU s/epoch (all)",
    "heap MB/rank",
    "MB sent/epoch (all)",
    "formula",
    "loss",
)
_PEERS = {"pyg": "PyG, one process", "dgl": "DGL, one process"}


def system_of(record: Record) -> str:
    """What was measured, in a few words."""
    if record["peer"]:
        return _PEERS[record["peer"]]
    words = [record["mode"]] + (["by sp.shard"] if record.get("in_memory") else [])
    if record["world"] > 1:
        words.append("shared memory" if record["share_memory"] else "messages")
    words += [] if record.get("huge_pages", True) else ["small pages"]
    return ", ".join(words + ([f"checkpoint={record['checkpoint']}"] if record["checkpoint"] else []))


def _cells(record: Record) -> list[str]:
    formula = "-"
    if not record["peer"] and record["world"] > 1 and not record["share_memory"]:
        formula = f"{record['halo_rows'] * bytes_per_row(record['model'], record['mode']) / 1e6:.1f}"
    traffic = f"{sent(record) / 1e6:.1f}"
    figures = [f"{cpu(record):.2f}", f"{heap(record):.1f}", traffic, formula, f"{record['losses'][-1]:.5f}"]
    return [record["graph"], record["model"], system_of(record), str(record["world"]), *figures]


def _table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in rows)]


def markdown(found: Record) -> str:
    """The report."""
    where, date, kind = found["machine"], found["date"], found.get("kind", "compare")
    lines = [f"# Speed, memory and traffic, {date}", "", *(f"- {text}" for text in verdicts(found)), ""]
    lines += [f"![peak per rank and CPU seconds against the number of ranks]({kind}-{date}.png)", ""]
    lines += [found["note"], ""] if "note" in found else []
    lines += _table(_HEADER, [_cells(record) for record in found["records"]])
    lines += ["", "## Kernels", ""]
    names = ("kernel", "CPU ms", "bytes it must move, MB", "bound, ms", "ratio")
    rows = [
        [
            one["name"], f"{one['seconds'] * 1e3:.1f}", f"{one['bytes'] / 1e6:.0f}",
            f"{one['bytes'] / one['bandwidth'] * 1e3:.1f}", f"{one['ratio']:.2f}",
        ]
        for one in found["kernels"]
    ]  # fmt: skip
    lines += _table(names, rows)
    lines += [
        "",
        "Graphs: undirected R-MAT graphs of 50,000 nodes with 1.55 M edges and of 20,000 with 3.02 M, 128 features, 32",
        "classes, randomly partitioned. SAGE: 3 layers of 256, mean. GAT: 3 layers of 4 heads x 32, the last averaged",
        "over heads. Both with BatchNorm and Adam, float32, one computing thread per rank, ranks under mpirun. All",
        "processes, PyG's and DGL's too, may use huge pages (THP_MEM_ALLOC_ENABLE=1), but for those marked small",
        "pages.",
        "",
        "CPU s: of all ranks together, the median of the epochs after the first. Heap: the peak of live memory above",
        "the loaded baseline (graph, features and model in memory), the largest rank's, windows that ranks share",
        "counted at their owner; `benchmarks/meter.py` says how. MB sent: payload of messages in the last epoch; the",
        "formula is in `benchmarks/traffic.py`. The reference is the SAR library, by the rows it sends per layer.",
        "Bound of a kernel: the bytes it must move (formulas in `benchmarks/kernels.py`) at the speed at which this",
        f"machine copies, measured in the same run: {found['kernels'][0]['bandwidth'] / 1e9:.1f} GB/s.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, torch_geometric {where['torch_geometric']}, shardpass "
        f"{where['shardpass']}.",
        "",
        f"Command: `python -m benchmarks.compare{' --bars' * (kind == 'bars')}`",
    ]
    return "\n".join(lines) + "\n"


def chart(records: list[Record], path: Path) -> None:
    """A row per model: peak memory per rank, with the line of 1 / W, and CPU seconds, both against W."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = sorted({record["model"] for record in records})
    figure = Figure(figsize=(10, 3.6 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    for pair, model in zip(figure.subplots(len(models), 2, squeeze=False), models):
        for graph, colour in zip(("50k30", "20k150"), ("tab:blue", "tab:orange")):
            _curves(pair, records, graph, model, colour)
        for axes, title in zip(pair, ("peak heap, MB per rank", "CPU s per epoch, all ranks")):
            axes.set(title=f"{model.upper()}: {title}", xlabel="ranks", xscale="log", xticks=[1, 2, 4, 8])
            axes.set_xticklabels(["1", "2", "4", "8"])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=7)
        pair[0].set(yscale="log")
        pair[1].set_ylim(0, None)
    figure.savefig(path, dpi=130)


def _curves(pair: Any, records: list[Record], graph: str, model: str, colour: str) -> None:
    left, right = pair
    for mode, style in (("sar", "-"), ("keep", "--"), ("halo", ":")):
        chosen = [pick(records, graph=graph, model=model, ranks=w, mode=mode if w > 1 else "sar") for w in (1, 2, 4, 8)]
        runs = [run for run in chosen if run]
        ranks = [run["world"] for run in runs]
        for axes, figure_of in ((left, heap), (right, cpu)):
            axes.plot(ranks, [figure_of(run) for run in runs], style, marker="o", color=colour, label=f"{graph} {mode}")
    if one := pick(records, graph=graph, model=model, ranks=1):
        left.plot([1, 8], [heap(one), heap(one) / 8], color=colour, alpha=0.4, linewidth=1, label=f"{graph} 1/W")
    for peer, style in (("dgl", "dashdot"), ("pyg", (0, (1, 4)))):
        if run := pick(records, graph=graph, model=model, ranks=1, peer=peer):
            for axes, figure_of in ((left, heap), (right, cpu)):
                axes.axhline(figure_of(run), linestyle=style, color=colour, alpha=0.6, label=f"{graph} {peer}")
