"""Scripts with SAR's names, started and failing: the documented script, ranks that go their own way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

dgl = pytest.importorskip("dgl")

from frontends.sar_cases import TESTS, free_port, homogeneous, of, start  # noqa: E402

pytestmark = pytest.mark.processes


def test_the_documented_script(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs" / "migrating-from-sar.md").read_text(encoding="utf-8")
    code = page.split("<!-- script: quick start -->\n```python\n")[1].split("```")[0]
    assert code.count('"gloo")') == 1
    code = code.replace('"gloo")', f'"gloo", master_port_number={free_port()})')
    (tmp_path / "train.py").write_text(code)
    g = homogeneous()
    g.ndata["feat"] = g.ndata["feat"].float()
    dgl.distributed.partition_graph(g, "mygraph", 2, str(tmp_path / "parts"), num_hops=1)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    children = [
        subprocess.Popen(
            [sys.executable, "train.py", "--rank", str(rank), "--world-size", "2"],
            cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [child.communicate(timeout=480)[0] for child in children]
    losses = [float(line.split()[-1]) for line in texts[0].splitlines() if line.startswith("epoch")]
    assert len(losses) == 20 and losses[-1] < losses[0], texts


@pytest.mark.long
@pytest.mark.parametrize(
    "case, told",
    [("skips_backward", "sync_gradients"), ("config_differs", "sar.Config, which was changed to mode=keep")],
)
def test_a_rank_that_goes_its_own_way_ends_all(
    case: str, told: str, parts: Callable[[int], Path], tmp_path: Path
) -> None:
    found, text = start(parts(2), tmp_path / "out", 2, [case])
    assert found == [None, None], text
    assert "rank 0" in text and "rank 1" in text and told in text
    assert "has waited" not in text, "they end because of the divergence, not because of a time-out"


def test_one_rank_is_wrong_and_all_are_told(results: list[Any]) -> None:
    told = of(results, "misuse")
    if len(told) == 1:
        return
    assert "ValueError: rank 1 holds part 0; load part 1 on it" in told[1]["part"]
    assert "PeerFailure: rank 1 could not construct the graph: rank 1 holds part 0" in told[0]["part"]
    for one in told:
        assert "DivergenceError: every rank must construct with the same Config: rank 0 has mode=sar" in one["Config"]
        assert "sar.Config.pipeline_depth is -1; expected an integer that is at least 1" in one["depth"]
        assert "rank 1 has no 'feat' of nodes of type '_N', which rank 0 has" in one["part lacks"]
    assert "3 of the seed nodes are not its own; expected ids in [" in told[1]["seeds"]
    assert "PeerFailure: rank 1 passed seed nodes" in told[0]["seeds"]
