"""Nothing grows: memory, descriptors, threads and shared memory of four ranks of MPI after thousands of steps.

``SOAK_STEPS=300 pytest -m long tests/failures/test_soak.py`` takes a tenth of the time.
"""

import json
import os
import re
from pathlib import Path

import pytest
from backends import launchers
from backends.launchers import needs_mpi

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.mpi, needs_mpi]
RANKS = 4
STEPS = {"epochs": 2000, "neighbours": 3000, "links": 3000, "blocks": 3000, "sar": 3000}
MEMORY = ("resident", "own")
WARM = 3  # of ten samples: allocators, caches and the compiled loops have what they need


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("what", STEPS)
def test_nothing_grows(what, store, tmp_path, monkeypatch):
    if what in ("blocks", "sar"):
        pytest.importorskip("dgl")
    folder = store
    if what == "sar":
        from frontends.sar_examples.data import write

        write(tmp_path, RANKS)
        folder = tmp_path
    monkeypatch.setattr(launchers, "PROGRAM", Path(__file__).with_name("soak.py"))
    steps = os.environ.get("SOAK_STEPS", str(STEPS[what]))
    ended = launchers.launch("mpirun", RANKS, what, 7000.0, STORE=str(folder), OUT=str(tmp_path), STEPS=steps)
    assert ended.code == 0, ended.text
    samples = json.loads(re.search(r"held: (.*)", ended.text)[1])
    grown = []
    for rank in range(RANKS):
        for name in samples[0][rank]:
            every = [sample[rank][name] for sample in samples]
            warm, last = max(every[:WARM]), every[-1]
            if last > warm * 1.01 or (name not in MEMORY and last > warm):
                grown.append(f"{name} on rank {rank}: {every}")
    assert len(samples) == 10 and not grown, "\n".join(grown)
