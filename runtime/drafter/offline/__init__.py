"""Training, evaluation and export of drafters apart from an RL run."""
