"""What `gpu` writes: a line for each bar, the tables, and a figure."""

from __future__ import annotations

import datetime
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine

Record = dict[str, Any]
SYSTEMS = ("shardpass", "eager", "compiled")
GRAPHS, MODELS, DTYPES = ("20k150", "50k30", "mesh"), ("gat", "gatv2", "transformer", "sage"), ("float32", "bfloat16")
RUNS, SHORTAGE = 100, 3


def of_case(records: list[Record], graph: str, model: str, key: str) -> dict[str, Any]:
    """A figure of each system, in float32, where it is known."""
    which = graph, model, "float32"
    return {
        r["system"]: r[key] for r in records if (r.get("graph"), r.get("model"), r.get("dtype")) == which and key in r
    }


def line(what: str, value: float | None, met: bool) -> str:
    """A bar and what was measured."""
    return f"not measured: {what}" if value is None else f"{'met' if met else 'MISSED'}: {what}: {value:.3g}"


def bars(records: list[Record], kernels: list[Record], tests: tuple[int, str]) -> list[str]:
    """One line for each bar."""
    found = []
    for way in ("forward", "backward"):
        ratios = [r["ratio"] for r in kernels if r["name"].startswith(f"attention {way}")]
        known = None if not ratios or None in ratios else max(ratios)
        found.append(line(f"attention {way} over its bound, the worst of three, at most 3", known, (known or 9) <= 3))
    for system, key, least in (("eager", "ms", 5.0), ("compiled", "ms", 1.5), ("eager", "peak_bytes", 20.0)):
        figures = of_case(records, "20k150", "gat", key)
        both = figures.get(system) and figures.get("shardpass")
        value = figures[system] / figures["shardpass"] if both else None
        what = f"{key} of GAT on 20k150, {system} over shardpass, at least {least:g}"
        found.append(line(what, value, (value or 0) >= least))
    losses = [of_case(records, graph, model, "loss") for graph, model in product(GRAPHS, MODELS)]
    off = [abs(r["shardpass"] / r["eager"] - 1) for r in losses if r.get("eager") and "shardpass" in r]
    found.append(
        line("losses off those of eager, in float32, at most 1e-4", max(off, default=None), max(off, default=1) <= 1e-4)
    )
    by_step = {r["system"]: r for r in records if r["system"] in ("bits", "cap") and "problem" not in r}
    runs, differs = by_step.get("bits", {}).get("runs"), sum("differs" in r for r in records)
    known = None if runs is None and not differs else differs
    found.append(
        line(
            f"of {runs or RUNS} runs with other bits than the first, none",
            known,
            differs == 0,
        )
    )
    cap = by_step.get("cap")
    what = f"a GAT trains in 1/{SHORTAGE} of the MiB that PyG needs, in which PyG's does not"
    found.append(
        line(
            what,
            None if cap is None else cap["needed"] / 2**20,
            cap is not None and cap["fits"] and not cap["pyg_fits"],
        )
    )
    code, text = tests
    count = {word: len(re.findall(rf" {word}\b", text)) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    met = code == 0 and count["PASSED"] > 0
    return [*found, f"{'met' if met else 'MISSED'}: tests on the GPU: {count}, exit code {code}"]


def table(records: list[Record], bandwidth: float) -> list[str]:
    """The steps in Markdown."""
    rows = [
        "| graph | model | dtype | system | ms | over bound | peak MiB | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        what = f"| {r['graph']} | {r['model']} | {r['dtype']} | {r['system']} |"
        if "problem" in r:
            rows.append(f"{what} {r['problem']} | | | |")
            continue
        over = r["ms"] * bandwidth / r["bytes_moved"] / 1e3  # 0 where the copies were not measured
        rows.append(f"{what} {r['ms']:.2f} | {over:.1f} | {r['peak_bytes'] / 2**20:.0f} | {r['loss']:.5f} |")
    return rows


def draw(records: list[Record], path: Path) -> None:
    """Milliseconds of steps in float32, by graph, model and system; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, len(GRAPHS), figsize=(12, 4), sharey=True, squeeze=False)
    for axis, graph in zip(axes[0], GRAPHS):
        for number, system in enumerate(SYSTEMS):
            found = {r["model"]: r.get("ms", 0) for r in records if (r["graph"], r["system"]) == (graph, system)
                     and r["dtype"] == "float32"}  # fmt: skip
            places = np.arange(len(MODELS)) + 0.27 * (number - 1)
            axis.bar(places, [found.get(model, 0) for model in MODELS], 0.25, label=system)
        axis.set(title=graph, yscale="log", xticks=range(len(MODELS)), xticklabels=MODELS)
    axes[0, 0].set_ylabel("milliseconds of a step")
    axes[0, -1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def save(
    folder: Path, device: torch.device, kernels: list[Record], records: list[Record], tests: tuple[int, str]
) -> list[str]:
    """Write the report of what there is so far, and return a line for each bar."""
    bandwidth, found = max((r["bandwidth"] for r in kernels), default=0.0), bars(records, kernels, tests)
    where = {**machine(), "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none"}
    stem = folder / f"gpu-{datetime.date.today()}"
    content = {"machine": where, "bandwidth": bandwidth, "bars": found, "kernels": kernels, "steps": records}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1))
    text = [
        f"# GPU, {datetime.date.today()}",
        "",
        "`python3 -m benchmarks.gpu`",
        "",
        *(f"- {one}" for one in found),
        "",
    ]
    text += [f"- {name}: {value}" for name, value in where.items()] + [f"- copies: {bandwidth / 1e9:.0f} GB/s", ""]
    text += ["| kernel | ms | over bound |", "|---|---|---|"]
    text += [
        f"| {r['name']} | {r['problem'] or round(1e3 * r['seconds'], 3)} | {r['problem'] or round(r['ratio'], 2)} |"
        for r in kernels
    ]
    text += ["", *table([r for r in records if "graph" in r], bandwidth), "", "```", tests[1][-5000:], "```"]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")
    return found
