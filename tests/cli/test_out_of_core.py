"""The benchmark of training within a memory budget: on a small graph, with the bound enforced."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

pytest.importorskip("torch_geometric")

from benchmarks import out_of_core
from benchmarks.machine import machine


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_only_mapped_features_and_offloading_fit_into_the_budget(tmp_path: Path) -> None:
    found = out_of_core.measure(tmp_path, (16_000, 5, 1024), {"hidden": 32, "layers": 6, "epochs": 3}, 0.25)
    found |= {"date": "2000-01-01", "machine": machine()}
    assert [text for text in out_of_core.findings(found) if "NOT" in text] == []
    memory, mapped, offload = found["records"][-3:]
    assert "failed" in memory and "failed" in mapped and "failed" not in offload
    assert found["records"][0]["losses"] == pytest.approx(offload["losses"], rel=1e-9)
    assert out_of_core.markdown(found).count("out of memory") == 2
