"""Small models for tests and demos: tasks, pretraining, evaluation."""
