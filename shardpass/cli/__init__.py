"""The `shardpass` command. Nothing here is imported by the library."""
