"""Answer with a token on a listening socket until standard input ends: ``python answering.py FILENO < token``.

A process of its own does this for rank 0, since a thread of rank 0 cannot: while MPI starts, it holds the interpreter
until all ranks have come. This file is run by its path and imports nothing of shardpass.
"""

import contextlib
import select
import socket
import sys

if __name__ == "__main__":
    token = sys.stdin.readline().strip().encode()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            with listener.accept()[0] as peer, contextlib.suppress(OSError):
                peer.sendall(token)
