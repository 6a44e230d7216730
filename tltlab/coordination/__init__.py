"""The worker coordinator without I/O: idle workers, drafter training on them, the drafters' canary."""
