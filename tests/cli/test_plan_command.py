"""`shardpass plan`, and `train --mode auto`."""

import itertools
import json
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
from cli_helpers import cli, passed, refused

import shardpass as sp
from shardpass.cli.planning import plan_page, ranks_for, segments
from shardpass.core.dryrun import TERMS, Estimate
from shardpass.core.ranks import MODES, bytes_text

COUNTS = ("--nodes", "20k", "--edges", "200K", "--features", "16", "--classes", "3", "--ranks", "8")


def test_a_table_and_the_same_as_json():
    text = passed("plan", *COUNTS, "--mode", "sar", "--budget", "1GiB")
    assert "temporaries" in text and "Take 8 ranks in mode sar" in text
    found = json.loads(passed("plan", *COUNTS, "--mode", "sar", "--budget", "1GiB", "--json"))
    (row,) = found["rows"]
    assert row["best"] and sum(row["terms"].values()) <= row["peak"] < found["budget"] == 1 << 30


def test_activations_that_are_computed_again_are_planned():
    layers = ("--layers", "6", "--dropout", "0.5", "--batch-norm", "--mode", "sar", "--json")
    kept, again = (
        json.loads(passed("plan", *COUNTS, *layers, *more))["rows"][0]["peak"] for more in ((), ("--recompute",))
    )
    assert again < kept


def test_a_long_plan_speaks_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("shardpass.cli.console.monotonic", itertools.count(0, 8).__next__)
    result = cli("plan", *COUNTS, "--ranks", "2", "--mode", "sar", "--mode", "keep")
    assert result.stderr == "estimates: 3 of 4, about 8 s left\n" and result.stdout.startswith("ranks")


def test_what_plan_cannot_do_is_said():
    assert "takes a store, or --nodes and --edges" in refused("plan", "--nodes", "5k")
    assert "expected a count such as" in refused("plan", "--nodes", "5 apples", "--edges", "1M")
    assert "expected a number of bytes" in refused("plan", *COUNTS, "--budget", "plenty")
    assert "mode is one of" in refused("plan", *COUNTS, "--mode", "fast")


def test_a_plan_is_for_the_ranks_that_a_store_has_parts_for(tmp_path):
    edges = torch.randint(0, 90, (2, 500), generator=torch.Generator().manual_seed(0))
    sp.partition({"edge_index": edges, "x": torch.rand(90, 4)}, tmp_path / "s", 3, "range")
    found = json.loads(passed("plan", tmp_path / "s", "--mode", "sar", "--json"))
    assert [row["ranks"] for row in found["rows"]] == [1, 2] and found["ranks_per_host"] == 1
    assert "the store has 3 parts" in refused("plan", tmp_path / "s", "--ranks", 4)
    assert ranks_for(sp.GraphCounts(1000, 5000, 16, 3)) == [1, 2, 4, 8]


def test_training_in_auto_shows_the_estimate(tmp_path):
    edges = torch.randint(0, 90, (2, 500), generator=torch.Generator().manual_seed(0))
    y = torch.arange(90) % 3
    sp.partition({"edge_index": edges, "x": torch.rand(90, 4), "y": y, "train_mask": y > 0}, tmp_path / "s", 2, "range")
    options = ("--mode", "auto", "--memory-budget", "1GiB", "--epochs", "2", "--log", tmp_path / "log")
    text = passed("train", tmp_path / "s", *options)
    assert "estimated" in text and "per rank, mode" in text
    summary = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert summary["estimated_peak_bytes"] > 0 and summary["mode"] in ("sar", "keep", "halo")
    assert "go together" in refused("train", tmp_path / "s", "--mode", "auto")


def test_a_model_that_needs_the_degrees_is_planned_without_them():
    assert "Take 8 ranks" in passed("plan", *COUNTS, "--mode", "sar", "--model", "pna")


def test_a_picture_and_a_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    files = ("--plot", tmp_path / "new" / "plan.png", "--page", tmp_path / "new" / "plan.html")
    text = passed("plan", *COUNTS, "--mode", "sar", "--budget", "1GiB", "--json", *files)
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "new" / "plan.html").read_text()
    assert "sage, 2 layers, hidden 64, on 20,000 nodes and 200,000 edges" in page
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page), "nothing is fetched"
    held, (row,) = json.loads(re.search("^const PLAN = (.*);$", page, re.M)[1]), json.loads(text)["rows"]
    assert held["steps"][held["start"]]["budget"] == 1 << 30 and held["steps"][held["start"]]["best"] == 0
    assert held["rows"][0]["peak"] == sum(count for _, count, _ in held["rows"][0]["segments"]) == row["peak"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "plan --plot needs the package 'matplotlib'" in refused("plan", *COUNTS, *files)
    assert "is a folder" in refused("plan", *COUNTS, "--page", tmp_path)


def estimates() -> list[Estimate]:
    """Made-up ones, with ties in the time and one in which loading needs the most."""
    draw = random.Random(0)
    rows = []
    for ranks in (1, 2, 4):
        for mode in MODES:
            terms = {term: draw.randrange(1 << 31) for term in (*TERMS, "process")}
            loading = draw.choice([0, 30 << 30])
            rows.append(Estimate(ranks, mode, terms, 5, loading, draw.choice([1 << 30, 2 << 30]), 0, "forward"))
    return rows


DOCUMENT = """
class Node {
  constructor(tag) { Object.assign(this, {tag, children: [], style: {}, listeners: {}, textContent: ""}); }
  appendChild(node) { this.children.push(node); node.parent = this; return node; }
  append(text) { this.children.push(text); }
  replaceChildren() { this.children = []; }
  remove() { this.parent.children = this.parent.children.filter((node) => node !== this); }
  querySelectorAll(tags) { return this.children.filter((node) => tags.split(", ").includes(node.tag)); }
  setAttribute(name, value) { this[name] = value; }
  addEventListener(name, call) { this.listeners[name] = call; }
}
const known = {};
const document = {
  getElementById: (id) => known[id] ??= new Node("#" + id),
  createElement: (tag) => new Node(tag),
};
"""
PROBE = """
const texts = (id) => known[id].children.flatMap((part) => part.children).map((row) =>
  row.children.map((cell) => String(cell.textContent)));
const state = () => ({budget: PLAN.steps[known.budget.value].budget, verdict: known.verdict.textContent,
  table: texts("table"), bars: known.bars.children.map((bar) => bar.children[1]["aria-label"])});
const states = [state()];
for (const step of [PLAN.steps.length - 1, 0, 30, 60, 90, 150]) {
  known.budget.value = step;
  known.ranks.value = String(step % 3);
  known.budget.listeners.input();
  states.push(state());
}
console.log(JSON.stringify(states));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_the_page_says_what_the_planner_says(tmp_path):
    rows, budget = estimates(), 12 << 30
    page = plan_page(sp.Plan(rows, budget), "<a model>")
    assert "&lt;a model&gt;" in page
    (tmp_path / "page.js").write_text(DOCUMENT + re.search("<script>(.*)</script>", page, re.S)[1] + PROBE)
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[0]["budget"] == budget and found[1]["budget"] is None
    assert len({state["verdict"] for state in found}) >= 4
    for state in found:
        planned = sp.Plan(rows, state["budget"])
        assert planned.verdict == state["verdict"]
        head, *lines = state["table"]
        assert head[0] == "ranks" and len(lines) == len(rows)
        printed = [re.split(" {2,}", line.strip()) for line in str(planned).splitlines()[1 : 1 + len(rows)]]
        for line, cells in zip(lines, printed):
            ranks, mode, *terms, loading, peak, fetched = cells[:14]
            mark = "".join(cells[14:]).removeprefix("<- ")
            assert line == [ranks, mode, peak, *terms, loading, fetched, mark]
        shown = {f"{row.mode} on {row.ranks} rank{'s' * (row.ranks > 1)}: {bytes_text(row.peak)}" for row in rows}
        assert shown.issuperset(state["bars"])
        assert len(state["bars"]) == 3
    assert all(sum(segments(row).values()) == row.peak for row in rows)
