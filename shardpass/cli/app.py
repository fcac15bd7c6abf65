"""The commands, their options and help texts. What they do is in the modules they import when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardpass.cli.console import told_in_words

app = typer.Typer(
    help="Train unmodified PyG models on whole graphs too large for one memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def partition(
    input: Annotated[
        str,
        typer.Argument(
            help=".npz, .json of a DGL partition, edge list (.npy, .parquet, .csv, .txt; the latter also .gz), folder "
            "with edges and features, dataset of OGB (folder or name), demo:digits or demo:powerlaw."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    parts: Annotated[
        int | None,
        typer.Option(help="Number of parts: the most ranks that can use the store [default: 4; of a .json its own]."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="metis, fennel or ldg (the graph may be larger than memory), random or range.")
    ] = "metis",
    seed: Annotated[int, typer.Option(help="Of the partitioner.")] = 0,
    assignment: Annotated[Path | None, typer.Option(help="An .npy with the part of each node, instead.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a store that is there already.")] = False,
    features: Annotated[
        Path | None, typer.Option(help="Edge lists: .npy, .parquet or .csv of features, [num_nodes, channels].")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Edge lists: .npy of class ids, -1 for unlabelled.")] = None,
    train_mask: Annotated[Path | None, typer.Option(help="Edge lists: .npy of booleans.")] = None,
    val_mask: Annotated[Path | None, typer.Option(help="Edge lists: .npy of booleans.")] = None,
    test_mask: Annotated[Path | None, typer.Option(help="Edge lists: .npy of booleans.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Edge lists: .npy of edge weights.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Edge lists without features, labels and masks.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Leave out this field (may be repeated).")] = None,
    passes: Annotated[int, typer.Option(help="fennel, ldg: times that all nodes stream by; more cut fewer edges.")] = 5,
    memory: Annotated[
        float, typer.Option(help="Edge lists and OGB: GiB for edges; the rest goes through files.")
    ] = 1.0,
) -> None:
    """Cut a graph into parts and write them to a directory."""
    from shardpass.cli.partitioning import Source, run_partition

    masks = {"train_mask": train_mask, "val_mask": val_mask, "test_mask": test_mask}
    source = Source(input, features, labels, masks, weights, num_nodes, tuple(drop or ()))
    with told_in_words():
        options = {"method": method, "seed": seed, "overwrite": overwrite, "passes": passes}
        run_partition(source, output, parts, assignment, {**options, "memory_bytes": int(memory * 2**30)})


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="A directory that `shardpass partition` wrote.")],
    ranks: Annotated[int | None, typer.Option(help="Show ranks instead of parts, for a run on this many.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every file.")] = False,
    layers: Annotated[int | None, typer.Option(help="Show what `graph.layers` saves in a model of so many.")] = None,
    mask: Annotated[str, typer.Option(help="With --layers: the node field of the wanted nodes.")] = "train_mask",
) -> None:
    """Show what a store holds and what its partition costs."""
    from shardpass.cli.inspecting import run_inspect, run_inspect_layers

    with told_in_words():
        run_inspect(store, ranks, verify)
        if layers is not None:
            run_inspect_layers(store, ranks, mask, layers)


@app.command()
def train(
    store: Annotated[Path, typer.Argument(help="A directory that `shardpass partition` wrote.")],
    model: Annotated[str, typer.Option(help="gcn, sage, gat, gin, pna or edgecnn (of torch_geometric.nn).")] = "sage",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden channels.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads (gat).")] = 4,
    epochs: Annotated[int, typer.Option(help="The epoch to train up to.")] = 100,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of Adam.")] = 0.0,
    dropout: Annotated[float, typer.Option(help="Dropout between layers.")] = 0.0,
    batch_norm: Annotated[bool, typer.Option(help="BatchNorm between layers, over all ranks' nodes.")] = False,
    mode: Annotated[
        str, typer.Option(help="sar (least memory), keep, halo, or auto. All give the same numbers.")
    ] = "sar",
    memory_budget: Annotated[
        str | None, typer.Option(help="With --mode auto: bytes per rank, as in 6GiB. The fastest mode that fits runs.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto: the launcher's, else threads. threads, processes, torch_distributed, mpi, local.")
    ] = "auto",
    ranks: Annotated[int | None, typer.Option(help="Ranks to start here, or to expect from the launcher.")] = None,
    threads: Annotated[int, typer.Option(help="Computing threads per rank.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the parameters.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    mask_prefix: Annotated[str, typer.Option(help="Before train_mask, val_mask and test_mask in field names.")] = "",
    split: Annotated[int, typer.Option(help="The column of masks that have one per split.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Epochs between two evaluations.")] = 1,
    # torchrun takes --log, even after the program's name, for an abbreviation of its own options
    log: Annotated[
        Path | None,
        typer.Option("--log", "--log-file", help="JSON lines: one per epoch, a summary. Under torchrun: --log-file."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The file to write while training.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Epochs between two checkpoints.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, on any ranks.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Trace one epoch to this file, one per rank, for Perfetto or chrome://tracing.")
    ] = None,
    events: Annotated[bool, typer.Option("--events", help="Print log lines instead of progress.", hidden=True)] = False,
) -> None:
    """Train a PyG model on the whole graph, on any number of ranks up to the number of parts.

    Alone, with --ranks N, or under `mpirun -n N` or `torchrun --nproc-per-node N --no-python`.
    """
    from shardpass.cli.config import TrainConfig
    from shardpass.cli.launch import choose_backend, run_ranks
    from shardpass.cli.training import train_rank

    with told_in_words():
        chosen = choose_backend(backend, ranks)
        config = TrainConfig(
            store=str(store), model=model, layers=layers, hidden=hidden, heads=heads, epochs=epochs, lr=lr,
            weight_decay=weight_decay, dropout=dropout, batch_norm=batch_norm, mode=mode,  # type: ignore[arg-type]
            seed=seed, dtype=dtype, mask_prefix=mask_prefix, split=split, eval_every=eval_every,  # type: ignore[arg-type]
            log=str(log) if log else None, checkpoint=str(checkpoint) if checkpoint else None,
            checkpoint_every=checkpoint_every, resume=resume, events=events, threads=threads,
            profile=str(profile) if profile else None,
            shared_process=chosen == "threads" and (ranks or 1) > 1, memory_budget=memory_budget,
        )  # fmt: skip
        run_ranks(train_rank, config, chosen, ranks)


@app.command()
def plan(
    store: Annotated[
        Path | None, typer.Argument(help="A directory that `shardpass partition` wrote; or give --nodes, --edges.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of a graph known by its counts, as in 111M.")] = None,
    edges: Annotated[str | None, typer.Option(help="Its edges, as in 3.2B.")] = None,
    features: Annotated[int, typer.Option(help="Its feature channels.")] = 128,
    classes: Annotated[int, typer.Option(help="Its classes.")] = 2,
    cut: Annotated[
        float | None, typer.Option(help="Its fraction of cut edges [default: that of a random partition].")
    ] = None,
    halo: Annotated[
        float | None, typer.Option(help="Its halo rows per own node [default: those of random edges].")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `train`.")] = "sage",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden channels.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads (gat).")] = 4,
    dropout: Annotated[float, typer.Option(help="Dropout between layers.")] = 0.0,
    batch_norm: Annotated[bool, typer.Option(help="BatchNorm between layers.")] = False,
    ranks: Annotated[
        list[int] | None, typer.Option(help="A number of ranks (may be repeated) [default: 1 2 4 8].")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="A mode (may be repeated) [default: all].")] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes per rank, as in 6GiB.")] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Processes of one host, which share memory.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Estimate the peak memory per rank of each mode and number of ranks, before anything runs."""
    from shardpass.cli.config import TrainConfig
    from shardpass.cli.planning import Graph, run_plan

    with told_in_words():
        config = TrainConfig(
            str(store), model=model, layers=layers, hidden=hidden, heads=heads, dropout=dropout, batch_norm=batch_norm
        )
        graph = Graph(store, nodes, edges, features, classes, cut, halo)
        run_plan(graph, config, ranks or [1, 2, 4, 8], mode, budget, ranks_per_host, json)


@app.command()
def infer(
    store: Annotated[Path, typer.Argument(help="A directory that `shardpass partition` wrote.")],
    output: Annotated[Path, typer.Argument(help="The .npy to write: a row per node, in the original order.")],
    weights: Annotated[
        Path, typer.Option(help="A checkpoint of `shardpass train`, or a state_dict: .pt, .safetensors.")
    ],
    model: Annotated[str, typer.Option(help="As in `train`, or FILE.py:FUNCTION that makes it of the graph.")] = "sage",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden channels.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads (gat).")] = 4,
    batch_norm: Annotated[bool, typer.Option(help="BatchNorm between layers.")] = False,
    frontend: Annotated[str, typer.Option(help="pyg calls model(x, graph), dgl calls model(graph, x).")] = "pyg",
    mode: Annotated[str, typer.Option(help="sar (least memory), keep or halo. All give the same numbers.")] = "sar",
    backend: Annotated[str, typer.Option(help="As in `train`.")] = "auto",
    ranks: Annotated[int | None, typer.Option(help="Ranks to start here, or to expect from the launcher.")] = None,
    threads: Annotated[int, typer.Option(help="Computing threads per rank.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there already.")] = False,
    tag: Annotated[str, typer.Option(help="Any text: a run does not continue one with another tag.")] = "",
) -> None:
    """Write a trained model's output for every node. A run that was ended goes on where it stood."""
    from shardpass.cli.inferring import InferConfig, infer_rank
    from shardpass.cli.launch import choose_backend, run_ranks

    with told_in_words():
        config = InferConfig(
            str(store), str(output), str(weights), model, layers, hidden, heads, batch_norm, frontend,
            mode, threads, dtype, overwrite, tag,  # type: ignore[arg-type]
        )  # fmt: skip
        run_ranks(infer_rank, config, choose_backend(backend, ranks), ranks)


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds each self-test may take.")] = 90.0,
) -> None:
    """Say what is installed, and try every way to run several ranks."""
    from shardpass.cli.doctor import run_doctor

    raise SystemExit(run_doctor(timeout))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The directory for the chart and the numbers.")] = Path("demo-out"),
    ranks: Annotated[int, typer.Option(help="Ranks of the distributed runs.")] = 4,
    nodes: Annotated[int, typer.Option(help="Nodes of the power-law graph of the second stage.")] = 100_000,
) -> None:
    """Train an unmodified GAT in one process and on several ranks; compare accuracy, loss and memory."""
    from shardpass.cli.demo.stages import run_demo

    with told_in_words():
        run_demo(output, ranks, nodes)
