"""Ranks that a program forks with multiprocessing. They end without ``atexit`` and ``sys.excepthook``."""

import subprocess
import sys

import pytest

from .launchers import free_port

pytestmark = pytest.mark.processes

PROGRAM = """
import multiprocessing, os, sys, time
import torch
import shardpass as sp
from shardpass.backends import watch

watch._NOTICE_SECONDS = 0.5  # a rank that computes on would be ended this soon

def rank(number, what):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
    comm = sp.connect()
    if number == 0:
        if what == "exits":
            sys.exit(3)
        if what == "fails":
            raise ZeroDivisionError("no luck")
        return
    if what != "ends early":
        comm.barrier("after the failure")
    time.sleep(2.5)
    print("rank 1 has gone on", comm.rank)

ranks = [multiprocessing.get_context(sys.argv[3]).Process(target=rank, args=(n, sys.argv[1])) for n in range(2)]
if __name__ == "__main__":
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print("codes", *[process.exitcode for process in ranks])
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["ends early", "fails", "exits"])
def test_forked_ranks(what: str, method: str, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "program.py", what, str(free_port()), method],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    text = ended.stdout + ended.stderr
    if what == "ends early":
        assert "codes 0 0" in text and "rank 1 has gone on" in text and "died" not in text, text
    else:
        code, reason = ("1", "ZeroDivisionError: no luck") if what == "fails" else ("3", "SystemExit: 3")
        assert f"codes {code} 1" in text and "rank 1 has gone on" not in text, text
        assert f"rank 0 failed first: {reason}" in text, text
