"""Scripts with SAR's names whose ranks go their own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

dgl = pytest.importorskip("dgl")

from frontends.sar_cases import of, start  # noqa: E402

pytestmark = pytest.mark.processes


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
