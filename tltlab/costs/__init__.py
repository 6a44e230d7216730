"""Time of a decode step, of drafting and of the stages of an RL step, as models that load from a file or a preset."""
