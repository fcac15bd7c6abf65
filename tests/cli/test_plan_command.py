"""`shardpass plan`, and `train --mode auto`."""

from __future__ import annotations

import json

import torch
from cli_helpers import passed, refused

import shardpass as sp

COUNTS = ("--nodes", "20k", "--edges", "200K", "--features", "16", "--classes", "3", "--ranks", "8")


def test_a_table_and_the_same_as_json():
    text = passed("plan", *COUNTS, "--mode", "sar", "--budget", "1GiB")
    assert "temporaries" in text and "Take 8 ranks in mode sar" in text
    found = json.loads(passed("plan", *COUNTS, "--mode", "sar", "--budget", "1GiB", "--json"))
    (row,) = found["rows"]
    assert row["best"] and sum(row["terms"].values()) <= row["peak"] < found["budget"] == 1 << 30


def test_what_plan_cannot_do_is_said():
    assert "takes a store, or --nodes and --edges" in refused("plan", "--nodes", "5k")
    assert "expected a count such as" in refused("plan", "--nodes", "5 apples", "--edges", "1M")
    assert "expected a number of bytes" in refused("plan", *COUNTS, "--budget", "plenty")
    assert "mode is one of" in refused("plan", *COUNTS, "--mode", "fast")


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
