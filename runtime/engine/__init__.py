"""The vLLM engine under a policy: control of speculation at each step, drafters, CUDA graphs, recording.

A policy passes through six files: `tltlab.policies.policy` reads its file, `tltlab.policies.specs` builds the selector,
`engine` (or `vllm.options`, for an engine of the user's own) hands it to the core, `control` asks it through
`tltlab.policies.driver` once per iteration, and `vllm.scheduler` executes its choice. `tracker` records the iteration
that verified each choice, and its outcome.
"""
