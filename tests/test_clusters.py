"""The files of ``examples/cluster``: scripts run, YAML has the fields of the schemas, the page quotes the files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardpass as sp

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
MANIFESTS = sorted(CLUSTER.glob("*.yaml"))

TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
"""The fields of `TrainJob.spec.trainer` in trainer.kubeflow.org/v1alpha1."""

JOB_SET = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"}
CONTAINER = {"name", "image", "command", "args", "env", "volumeMounts", "readinessProbe", "resources"}
POLICIES = {
    "torch": {"numProcPerNode"},
    "mpi": {"numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode"},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(pytest.importorskip("yaml").safe_load_all(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.access(script, os.X_OK)


@pytest.mark.processes
def test_a_slurm_script_trains(tmp_path: Path) -> None:
    """With a stand-in for srun, on two ranks."""
    pytest.importorskip("torch_geometric")
    pytest.importorskip("typer")
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {
        "srun": f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "fake_srun.py"}" "$@"\n',
        "shardpass": f'#!/bin/bash\nexec "{sys.executable}" -m shardpass.cli "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    ring = torch.stack([torch.arange(40), (torch.arange(40) + 1) % 40])
    graph = {
        "edge_index": ring,
        "x": torch.randn(40, 4),
        "y": torch.arange(40) % 2,
        "train_mask": torch.ones(40).bool(),
    }
    sp.partition(graph, tmp_path / "parts", parts=2, method="range")
    slurm = {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0"}
    kept = {name: value for name, value in os.environ.items() if not re.match(r"RANK$|WORLD_SIZE$|OMPI_|PMI", name)}
    words = ["bash", str(CLUSTER / "slurm-4-nodes.sh"), "parts", "--model", "sage", "--epochs"]
    done = subprocess.run(
        [*words, "2"], cwd=tmp_path, capture_output=True, text=True, timeout=480, check=False,
        env={**kept, **slurm, "VENV": str(tmp_path / "venv"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout and (tmp_path / "run.ckpt").exists()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_of_their_schemas(path: Path) -> None:
    by_kind = {found["kind"]: found for found in documents(path)}
    for found in by_kind.values():
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    if path.name.startswith("trainjob"):
        check_training(by_kind["TrainingRuntime"], by_kind["TrainJob"])
    elif path.name == "network-policy.yaml":
        policy = by_kind["NetworkPolicy"]
        assert policy["apiVersion"] == "networking.k8s.io/v1"
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    else:
        pod = by_kind["Job"]["spec"]["template"]["spec"]
        check_pod(pod)
        check_command(pod["containers"][0]["command"])
        assert by_kind["PersistentVolumeClaim"]["metadata"]["name"] == "graphs"


def check_training(runtime: dict[str, Any], job: dict[str, Any]) -> None:
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert set(job["spec"]) == {"runtimeRef", "trainer"} and set(job["spec"]["trainer"]) <= TRAINER
    assert set(runtime["spec"]) == {"mlPolicy", "template"}
    (policy,) = set(runtime["spec"]["mlPolicy"]) - {"numNodes"}
    assert set(runtime["spec"]["mlPolicy"][policy]) <= POLICIES[policy]
    job_set = runtime["spec"]["template"]["spec"]
    assert set(job_set) <= JOB_SET
    trained = [
        replicated["name"]
        for replicated in job_set["replicatedJobs"]
        if replicated["template"]
        .get("metadata", {})
        .get("labels", {})
        .get("trainer.kubeflow.org/trainjob-ancestor-step")
    ]
    assert trained == ["launcher" if policy == "mpi" else "node"], "the job whose command the TrainJob gives"
    for replicated in job_set["replicatedJobs"]:
        assert replicated["template"]["spec"]["backoffLimit"] == 0
        pod = replicated["template"]["spec"]["template"]["spec"]
        check_pod(pod)
        assert [container["name"] for container in pod["containers"]] == ["node"], "Trainer looks for this name"
    trainer = job["spec"]["trainer"]
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    words = [*trainer["command"], *trainer["args"]]
    check_command(words)
    assert policy == "torch" or words[words.index("-n") + 1] == str(ranks)
    threads = int(words[words.index("--threads") + 1])
    assert threads * trainer["numProcPerNode"] <= int(trainer["resourcesPerNode"]["requests"]["cpu"])


def check_pod(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert set(container) <= CONTAINER
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(word, str) for word in [*container.get("command", ()), *container.get("args", ())])


def check_command(words: list[str]) -> None:
    """The `shardpass` command line among these words is one that the command takes."""
    typer = pytest.importorskip("typer")
    from shardpass.cli.app import app

    place = next(index for index, word in enumerate(words) if Path(word).name == "shardpass")
    _, name, *arguments = words[place:]
    typer.main.get_command(app).commands[name].make_context(name, arguments)


def test_the_page_quotes_the_files() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w.-]+)`:\n\n```\w+\n(.*?)^```", text, re.S | re.M)
    assert {name for name, _ in quoted} >= {path.name for path in SCRIPTS}
    for name, block in quoted:
        assert block in (CLUSTER / name).read_text(encoding="utf-8"), f"{name} has changed"
    for path in CLUSTER.iterdir():
        assert path.name in text, f"docs/clusters.md does not name {path.name}"


def test_the_dockerfile_copies_what_there_is_and_installs_extras_that_exist() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.M) for extra in extras.split(","))
    assert text.index("TORCH_INDEX") < text.index(extras), "torch first: else the resolver takes another build"
