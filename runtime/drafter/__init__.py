"""Training of the learned drafter: data buffer, loss, processes, checkpoints, transfer of sequences from rollouts."""
