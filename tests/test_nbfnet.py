"""The example of link prediction over the whole graph has the losses and the ranks of plain PyG."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardpass as sp

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_nbfnet_is_that_of_plain_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses, and the filtered ranks of the facts held out, on 1 and 3 ranks."""
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.set_default_dtype(torch.float64)
    try:
        example = importlib.import_module("nbfnet")
        torch.manual_seed(0)
        data, train, test = example.families(20)
        model, known, nodes = example.NBFNet(8), torch.cat([train, test], 1), torch.arange(80)

        def shared(comm: Any) -> tuple[list[float], torch.Tensor]:
            graph, mine = sp.shard(data, comm), sp.pyg.wrap(copy.deepcopy(model), comm)
            return example.train_on(graph, mine, train, 6), example.ranks_of(graph, mine, test, known)

        results = [result for ranks in (1, 3) for result in sp.spawn(shared, ranks)]
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for step in range(6):
            queries = train[:, drawn := example.drawn_at(step, train)]
            kept = ~torch.isin(data.edge_fact, drawn % (train.size(1) // 2))
            scores = model(nodes[:, None] == queries[0], queries[1], data.edge_index, data.edge_type, kept)
            is_wrong = ~example.known_tails(nodes, queries, train)
            right, wrong = scores.gather(0, queries[2:]), scores[is_wrong]
            loss = torch.nn.functional.softplus(-right).mean() + torch.nn.functional.softplus(wrong).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        every = torch.ones_like(data.edge_type, dtype=torch.bool)
        with torch.no_grad():
            scores = model(nodes[:, None] == test[0], test[1], data.edge_index, data.edge_type, every)
    finally:
        torch.set_default_dtype(torch.float32)
    tails = {(h, r): {*known[2, (known[0] == h) & (known[1] == r)].tolist()} for h, r, _ in test.T.tolist()}
    for found, ranks in results:
        assert found == pytest.approx(losses, abs=1e-10)
        for (h, r, tail), column, rank in zip(test.T.tolist(), scores.T, ranks.tolist()):
            gaps = torch.stack([column[node] - column[tail] for node in range(80) if node not in tails[h, r]])
            assert 1 + (gaps > 1e-9).sum() <= rank <= 1 + (gaps > -1e-9).sum()
