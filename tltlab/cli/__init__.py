"""The `tltlab` command: its entry point and the commands of the core."""
