"""The planner: what it adds up, what it picks, what it says."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GAT, GraphSAGE, HeteroConv, SAGEConv
from torch_geometric.nn.aggr import MedianAggregation

import shardpass as sp
from shardpass.core.dryrun import Estimate
from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.rank import made_up_edges, made_up_rank
from shardpass.core.dryrun.trial import dry_run, extrapolate
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import EDGE, NODE
from shardpass.planning.plan import _training
from shardpass.planning.sizes import expected_halo, sizes_of

COUNTS = sp.GraphCounts(nodes=20_000, edges=200_000, num_features=16, num_classes=3)


def gat():
    return GAT(16, 32, 2, 3, heads=4)


@pytest.fixture(scope="module")
def planned():
    return sp.plan(gat(), COUNTS, ranks=[4, 8], options=sp.Options(backward="push"))  # which fetches twice in sar mode


def test_terms_are_summed_and_none_is_negative(planned):
    for row in planned.rows:
        assert row.training == sum(row.terms.values()) and min(row.terms.values()) >= 0
        assert row.peak >= row.training > row.above_loaded > 0


def test_keeping_rows_needs_more_and_more_ranks_need_less(planned):
    for ranks in (4, 8):
        sar, keep, halo = (planned.on(ranks, mode) for mode in ("sar", "keep", "halo"))
        assert sar.training <= keep.training <= halo.training
        assert sar.fetched > keep.fetched == halo.fetched
    assert planned.on(8, "sar").training < planned.on(8, "keep").training  # of few large blocks sar has as many at once
    assert planned.on(8, "sar").peak < planned.on(4, "sar").peak


def test_features_are_as_many_bytes_as_there_are():
    row = sp.plan(gat(), COUNTS, ranks=[4], modes=["sar"]).rows[0]
    assert row.terms["features"] == pytest.approx(5_000 * (16 * 4 + 8 + 1), rel=0.01)


def test_a_budget_picks_the_fastest_that_fits(planned):
    sar, keep = planned.on(8, "sar"), planned.on(8, "keep")
    assert sar.seconds > keep.seconds and sar.peak < keep.peak
    assert replace(planned, budget=keep.peak).best is keep
    assert replace(planned, budget=keep.peak - 1).best is sar
    assert "Take 8 ranks in mode sar" in str(replace(planned, budget=keep.peak - 1))


def test_a_plan_says_which_ranks_share_a_host(planned):
    assert str(planned).endswith(
        "Each rank has a host of its own here; if several share one, pass ranks_per_host (--ranks-per-host)."
    )
    assert str(replace(planned, per_host=4)).endswith("4 ranks share each host here, and its memory.")
    alone = replace(planned, rows=[replace(planned.rows[0], ranks=1)])
    assert not alone.assumed and "Take 1 rank in mode" in str(alone)
    found = sp.plan(gat(), COUNTS, ranks=[2], modes=["sar"], ranks_per_host=2)
    assert found.per_host == 2


def test_a_plan_says_that_it_assumes_random_parts():
    for counts, ranks, is_said in (
        (COUNTS, [2], True), (COUNTS, [1], False), (replace(COUNTS, cut_fraction=0.2, halo_fraction=0.1), [2], False)
    ):  # fmt: skip
        found = sp.plan(gat(), counts, ranks=ranks, modes=["sar"])
        assert ("Edges between random nodes in random parts are assumed" in str(found)) == is_said


def test_partial_sums_are_taken_between_hosts_where_they_spare_rows(tmp_path):
    src, dst = torch.arange(600).remainder(300), torch.arange(600).remainder(2) + 300  # 300 rows, or two sums
    data = {"edge_index": torch.stack([src, dst]), "x": torch.rand(400, 8), "y": torch.arange(400) % 3}
    data["train_mask"] = data["y"] > 0
    sp.partition(data, tmp_path / "store", 2, assignment=(torch.arange(400) >= 300).long())
    model = GraphSAGE(8, 16, 2, 3)
    found = sp.plan(model, tmp_path / "store", ranks=[2], modes=["sar"])
    assert found.spared == 1 - 2 / 300 and found.options.partial_sums
    assert "layers that sum fetch 99% fewer rows between hosts" in str(found)
    more = found.best.peak + found.best.terms["activations"]
    assert replace(found, budget=more).options.partial_sums
    assert not replace(found, budget=more - 1).options.partial_sums  # what they copy has no room
    together = sp.plan(model, tmp_path / "store", ranks=[2], modes=["sar"], ranks_per_host=2)
    for other in (together, replace(found, spared=0.04)):
        assert not other.options.partial_sums and "partial sums" not in str(other)
    assert sp.plan(gat(), COUNTS, ranks=[2], modes=["sar"]).spared == 0.0


def test_nothing_fits_is_said_with_what_would():
    found = sp.plan(gat(), COUNTS, ranks=[2], modes=["keep"], budget="90MiB")
    assert found.best is None and found.larger is not None and found.larger.peak <= 90 << 20
    assert f"{found.larger.ranks} ranks in mode sar would fit" in found.verdict
    assert "Nothing fits 90.0 MiB per rank. The smallest is" in str(found)


def test_two_small_ranks_tell_of_a_large_one():
    """The extrapolation against a dry run of the rank as it is."""
    model = GraphSAGE(16, 32, 2, 3, norm="batch_norm")
    training = _training(model, torch.optim.Adam, None, None, "pyg")
    sizes, options = sizes_of(COUNTS, 4), sp.Options(mode="sar", chunk_bytes=1 << 14)
    whole = Estimate.of(dry_run(training, sizes, options), 4, "sar")
    scales = (0.2, 0.4)
    small, large = (dry_run(training, sizes.scaled(scale), options) for scale in scales)
    found = Estimate.of(extrapolate(small, large, scales), 4, "sar")
    assert found.peak == pytest.approx(whole.peak, rel=0.02)
    assert found.fetched == pytest.approx(whole.fetched, rel=0.05)
    for term in ("store", "features", "parameters", "activations"):
        assert found.terms[term] == pytest.approx(whole.terms[term], rel=0.1)


def test_a_rank_has_its_share_of_the_counts():
    sizes = sizes_of(COUNTS, 4)
    edges = sizes.edges[EDGE]
    assert (sizes.num_nodes, edges.count) == (5_000, 50_000) and edges.halo_rows <= edges.cut


def test_the_model_and_the_random_state_stay():
    model, state = gat(), torch.get_rng_state()
    before = [parameter.clone() for parameter in model.parameters()]
    sp.plan(model, COUNTS, ranks=[8], modes=["sar"])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))


class Median(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(16, 3, aggr=MedianAggregation())

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def test_modes_that_a_model_cannot_run_in_are_left_out():
    found = sp.plan(Median(), sp.GraphCounts(400, 1000, 16, 3), ranks=[2])
    assert [row.mode for row in found.rows] == ["halo"] and set(found.left_out) == {"sar", "keep"}


def test_a_store_is_planned_from_what_it_holds(tmp_path):
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 900, (2, 5000), generator=generator)
    x, y = torch.rand(900, 16), torch.arange(900) % 3
    fields = {"x": x, "phase": torch.polar(x, x), "y": y, "train_mask": y > 0}
    sp.partition({"edge_index": edges, **fields}, tmp_path / "store", 4, "random")
    groups = sp.inspect(tmp_path / "store", 2).groups
    sizes = sizes_of(tmp_path / "store", 2)
    assert sizes.edges[EDGE].halo_rows == max(group.num_halo_rows for group in groups)
    assert sizes.nodes[NODE].num_classes == 3
    assert sp.plan(gat(), tmp_path / "store", ranks=[2], modes=["sar"]).rows[0].terms["features"] > 0
    with pytest.raises(ValueError, match="8 ranks, but the store has 4 parts"):
        sp.plan(gat(), tmp_path / "store", ranks=[8])


def test_the_expected_halo_is_bounded_by_nodes_and_edges():
    assert expected_halo(1000, 1) == 1 and expected_halo(1000, 10**6) == 1000 and expected_halo(0, 5) == 0
    assert 600 < expected_halo(1000, 1000) < 640  # 1 - 1 / e


def test_counts_that_make_no_sense_are_refused():
    for wrong in ({"nodes": 0}, {"cut_fraction": 1.5}, {"halo_fraction": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(COUNTS, **wrong)


def test_recomputed_activations_are_planned_smaller():
    model = GraphSAGE(16, 64, 3, 3, norm="batch_norm", dropout=0.5)
    kept, again = (
        sp.plan(model, COUNTS, ranks=[2], modes=["sar"], checkpoint=choice).rows[0] for choice in (None, "activations")
    )
    assert again.training < kept.training


def test_ranks_of_one_host_share_memory():
    """Rows that lie in windows do not travel; of four ranks, two on this host, half of the peers still send."""
    sizes, options = sizes_of(COUNTS, 4), sp.Options(mode="sar")
    for per_host, peers in ((2, 1), (4, 3)):
        comm = Ranks(DryCommunicator(4, per_host=per_host))
        plan = made_up_rank(sizes, comm, options, made_up_edges(sizes)).relation.plan
        assert [places.numel() for places in plan.shared.places[1:]] == [
            count if rank < per_host else 0 for rank, count in enumerate(plan.schedule.counts[0][1:], 1)
        ]
        assert plan.shared.rows.equal(torch.unique(torch.cat(plan.send_rows[1 : 1 + peers])))
    training = _training(gat(), torch.optim.Adam, None, None, "pyg")
    sent = [dry_run(training, replace(sizes, per_host=count), options).sent for count in (1, 2, 4)]
    assert sent[1] == pytest.approx(2 / 3 * sent[0], rel=0.01) and sent[2] < 1000  # only tokens


def test_a_window_is_counted_once_and_not_if_rows_travel_as_messages():
    alone = sp.plan(gat(), COUNTS, ranks=[4], modes=["sar"]).rows
    shared = sp.plan(gat(), COUNTS, ranks=[4], modes=["sar"], ranks_per_host=4).rows
    messages = sp.Options(share_memory=False)
    assert sp.plan(gat(), COUNTS, ranks=[4], modes=["sar"], ranks_per_host=4, options=messages).rows == alone
    assert shared[0].terms != alone[0].terms and shared[0].fetched < alone[0].fetched / 1000
    with pytest.raises(ValueError, match="ranks_per_host is at least 1"):
        sp.plan(gat(), COUNTS, ranks=[4], ranks_per_host=0)


class Typed(nn.Module):
    """Authors to papers and back, with classes of papers."""

    def __init__(self):
        super().__init__()
        kinds = ("author", "writes", "paper"), ("paper", "written_by", "author")
        self.first = HeteroConv({kind: SAGEConv((-1, -1), 16) for kind in kinds})
        self.last = HeteroConv({kinds[0]: SAGEConv((16, 16), 3)})

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: x.relu() for kind, x in self.first(x_dict, edge_index_dict).items()}
        return self.last(x_dict, edge_index_dict)["paper"]


def typed_store(path, num_authors=400, num_papers=1000, num_edges=8000, labels=("paper",)):
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(0, count, (num_edges,), generator=generator) for count in (num_authors, num_papers)]
    data = HeteroData({"author": {"x": torch.rand(num_authors, 8)}, "paper": {"x": torch.rand(num_papers, 24)}})
    data["author", "writes", "paper"].edge_index = torch.stack(ends)
    data["paper", "written_by", "author"].edge_index = torch.stack(ends[::-1])
    for kind in labels:
        data[kind].y = torch.arange(data[kind].num_nodes) % 3
    sp.partition(data, path, 2, "random")
    return data


def test_graphs_of_several_types_are_planned(tmp_path):
    data, model = typed_store(tmp_path / "store"), Typed()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)  # which gives lazy parameters their shapes
    one, two = sp.plan(model, tmp_path / "store", ranks=[1, 2], modes=["sar"]).rows
    assert one.terms["features"] == 400 * 8 * 4 + 1000 * (24 * 4 + 8 + 1)
    assert two.fetched > 0 and two.training < one.training
    beyond = sizes_of(tmp_path / "store", 8, beyond_parts=True)
    assert beyond.num_edges == 2 * 1000 and [own.count for own in beyond.nodes.values()] == [50, 125]


def test_a_plan_without_one_type_of_labels_asks_for_a_loss(tmp_path):
    for number, labels in enumerate([(), ("author", "paper")]):
        data, model = typed_store(tmp_path / str(number), labels=labels), Typed()
        with torch.no_grad():
            model(data.x_dict, data.edge_index_dict)
        with pytest.raises(ValueError, match=r"one node type that has labels .* pass loss="):
            sp.plan(model, tmp_path / str(number), ranks=[1], modes=["sar"])
        loss = lambda out, graph: out.square().sum()  # noqa: E731
        assert sp.plan(model, tmp_path / str(number), ranks=[1], modes=["sar"], loss=loss).rows
