"""Small models made here: tasks, pretraining, how good they are."""
