"""Ranks that a program forks with multiprocessing. They end without ``atexit`` and ``sys.excepthook``."""

import re
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

def rank(number, what, port):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for what, port in zip(("ends early", "fails", "exits"), sys.argv[2:]):
        ranks = [context.Process(target=rank, args=(number, what, port)) for number in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        print("codes", *[process.exitcode for process in ranks], flush=True)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_forked_ranks(method: str, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "program.py", method, *(str(free_port()) for _ in range(3))],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=360,
    )  # fmt: skip
    early, code, fails, fail_codes, exits, exit_codes, _ = re.split(r"^codes (.*)\n", ended.stdout, flags=re.MULTILINE)
    assert code == "0 0" and "rank 1 has gone on" in early and "died" not in early, early
    for text, codes, reason in (
        (fails, (fail_codes, "1 1"), "ZeroDivisionError: no luck"),
        (exits, (exit_codes, "3 1"), "SystemExit: 3"),
    ):
        assert codes[0] == codes[1] and "rank 1 has gone on" not in text, text
        assert f"rank 0 failed first: {reason}" in text, text
