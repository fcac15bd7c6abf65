"""`shardpass demo`: an unmodified GAT in one process and on several ranks, side by side."""
