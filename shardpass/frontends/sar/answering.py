"""Answer with a token on a listening socket until standard input ends: ``python answering.py FILENO < token``.

A process of its own does this for rank 0, since a thread of rank 0 cannot: while MPI starts, it holds the interpreter
until all ranks have come. This file is run by its path and imports nothing of shardpass.
"""

import select
import socket
import sys


def main() -> None:
    """Answer everybody who connects."""
    token = sys.stdin.readline().strip().encode()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            peer, _ = listener.accept()
            with peer:
                try:
                    peer.sendall(token)
                except OSError:
                    continue


if __name__ == "__main__":
    main()
