"""Time of a decode step, of drafting and of the stages of an RL step: models, their files and presets, and fits."""
