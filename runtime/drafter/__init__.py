"""The learned drafter's training: data buffer, loss, its own process, checkpoints, the feed from rollouts."""
