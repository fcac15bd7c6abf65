"""`python -m shardpass.cli`: the `shardpass` command where its script is not on PATH, as under mpirun or torchrun."""

from shardpass.cli.main import main

if __name__ == "__main__":
    main()
