"""The benchmark programs: graphs, one small measurement with its peer, and what the report makes of figures."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import gpu, gpu_report, partitioning, report
from benchmarks import kernels as single
from benchmarks.graphs import make_graph, rmat_edges
from benchmarks.run import Bench, row


def test_graphs() -> None:
    edges = rmat_edges(1000, 10)
    src, dst = edges.astype(np.int64)
    assert edges.shape == (2, 11_000) and set(src * 1000 + dst) == set(dst * 1000 + src)
    graph = make_graph("dense:300:7")
    assert graph["edge_index"].shape == (2, 2100) and graph["x"].shape == (300, 128)
    assert (make_graph("dense:300:7")["edge_index"] == graph["edge_index"]).all()
    with pytest.raises(ValueError, match="unknown graph 'thin:3'; expected 50k30"):
        make_graph("thin:3")


@pytest.mark.long
@pytest.mark.processes
def test_a_measurement_and_its_peer_agree_on_the_losses(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    base = {"graph": "dense:300:7", "model": "sage", "mode": "sar", "backend": "processes", "epochs": 2}
    ours = bench.measure({**base, "ranks": 2, "peer": None}, 2, ("memory",))
    peer = bench.measure({**base, "ranks": 1, "peer": "pyg"}, 2, ("memory",))
    assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-4)
    assert ours["world"] == len(ours["ranks"]) == 2 and ours["num_edges"] == 2100
    for figures in ours["ranks"]:
        assert figures["peak_bytes"] > 0 and figures["bytes_sent"] > 0 and "cpu_seconds" not in figures
    assert len(row(ours)) == 10
    json.dumps(ours)


@pytest.mark.long
@pytest.mark.processes
def test_partitioners_are_compared(tmp_path: Path) -> None:
    records = partitioning.compare("community:2000:10", ["random", "kaminpar"], 4, {"threads": 1}, tmp_path)
    random, kaminpar = records
    assert random["edges"] == kaminpar["edges"] == 20_000 and random["cut"] == pytest.approx(0.75, abs=0.02)
    assert kaminpar["cut"] < 0.4 * random["cut"] and kaminpar["node_balance"] < 1.2
    assert partitioning.table(records).row_count == 2


def test_the_report_tells_what_holds_and_what_does_not(tmp_path: Path) -> None:
    records = []
    for config in report.configurations(with_pyg=True):
        ranks, degree = config["ranks"], int(config["graph"].split(":")[2])
        grows = degree if config["model"] == "gat" else 0
        figures: dict[str, Any] = dict.fromkeys(("kept_bytes", "bytes_sent"), 0)
        figures |= {"peak_bytes": (100 << 20) // ranks, "transient_bytes": (50 + grows) << 20}
        filled = {"world": ranks, "ranks": [figures] * ranks, "num_edges": 20_000 * degree, "losses": [1.0]}
        records.append({**config, **filled})
    verdicts = ["does NOT hold" if "NOT" in text else "holds" for text in report.findings(records)[:4]]
    assert verdicts == ["holds", "holds", "holds", "does NOT hold"]
    text = report.markdown(records, "2000-01-01", report.machine())
    assert text.count("| gat |") == 8 and "python -m benchmarks.report" in text
    report.chart(records, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_the_report_of_sampling_compares_with_dgl() -> None:
    pytest.importorskip("dgl")
    from benchmarks import sampling

    ranks = [[{"cpu": 1.0, "edges": 2e6}], [{"cpu": 4.0, "edges": 6e6}]]
    (both,) = sampling.summed(ranks)
    figures = sampling.best([both, {"cpu": 8.0, "busiest": 8.0, "edges": 8e6}])
    assert figures == {"busiest": 2.0, "all": 1.6, "edges": 8e6}
    scores = {"DGL, one process": [0.8, 0.9], "2 rank(s)": [0.7, 0.8]}
    accuracy = {"graph": "small", "epochs": 3, "batch_size": 8, "revision": "commit 1", "accuracy": scores}
    where = dict.fromkeys(("cpu", "cores", "memory_gib", "system", "python", "torch", "shardpass"), "?")
    found = {"date": "today", "command": "c", "machine": where, "accuracy": [accuracy]}
    text = sampling.markdown({**found, "throughput": [{"run": "blocks", "ranks": 2, **figures}]})
    assert "| blocks | 2 | 2.0 | 1.6 |" in text
    assert "| DGL, one process | 85.00 | 7.07 |  |  |" in text
    assert "| 2 rank(s) | 75.00 | 7.07 | -10.00 ± 7.07 | -1.4 |" in text


class OneFails:
    """Kernels of which the first raises."""

    x = torch.ones(1)

    def kernels(self) -> dict[str, Any]:
        return {"attention forward, GAT": (lambda: 1 // 0, 8), "attention backward, GAT": (lambda: None, 8)}


def test_a_kernel_that_fails_is_a_line_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "copy_bandwidth", lambda *_: 1e9)
    measured = list(single.measure(OneFails(), 1))  # type: ignore[arg-type]
    assert measured[0].problem.startswith("ZeroDivisionError") and measured[1].problem == ""
    rows = [{**one._asdict(), "ratio": None if one.problem else 2.0} for one in measured]
    case = {"graph": "20k150", "model": "gat", "dtype": "float32", "bytes_moved": 8, "peak_bytes": 40, "loss": 1.0}
    records = [{**case, "system": "shardpass", "ms": 1.0}, {**case, "system": "eager", "ms": 4.0, "loss": 1.1}]
    records += [{"system": "compiled", "graph": "mesh", "model": "gat", "dtype": "float32", "problem": "no compiler"}]
    records += [{"system": "bits", "runs": 100}, {"system": "cap", "needed": 2**30, "pyg_fits": False, "fits": True}]
    tests = 0, "a.py::one PASSED\na.py::two SKIPPED"
    lines = gpu_report.save(tmp_path, torch.device("cpu"), rows, records, tests)
    assert [line.split(":")[0] for line in lines] == [
        "not measured", "met", "MISSED", "not measured", "MISSED", "MISSED", "met", "met", "met"
    ]  # fmt: skip
    (text,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert "ZeroDivisionError" in text and "no compiler" in text
    assert gpu_report.bars([], [], (1, ""))[0].startswith("not measured")


def test_a_process_that_has_lost_the_gpu_is_begun_again_after_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CASES", gpu.CASES[:3])
    monkeypatch.setattr(gpu, "graph_data", lambda *_: 1 // 0)
    monkeypatch.setattr(gpu, "is_lost", lambda _: True)
    said, begun = iter([(1, None), (134, "terminate called"), (0, None)]), []

    def child(arguments: list[str], limit: float) -> tuple[int, str]:
        begun.append(first := int(arguments[arguments.index("--first") + 1]))
        code, text = next(said)
        records = gpu.measure("eager", torch.device("cpu"), True, first)
        return code, text or "\n".join(map(json.dumps, records))

    monkeypatch.setattr(gpu, "child", child)
    found = gpu.collected("eager", 3, [], float("inf"))
    assert begun == [0, 1, 2]
    assert [one["problem"].split(":")[0] for one in found] == [
        "ZeroDivisionError", "the process ended with 134", "ZeroDivisionError"
    ]  # fmt: skip


@pytest.mark.long
def test_other_tiles_of_every_kernel(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TILES", ((8, 2),))
    rows = list(gpu.tiles(triton_device, small=True))
    assert "8 edges, 2 warps" in rows[0] and len(rows) == 2 * (2 + 16)
    assert all(float(cell) > 0 for row in rows[2:18] for cell in row.split("|")[2:4])
