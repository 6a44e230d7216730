"""The vLLM engine under a policy: control of speculation at each step, drafters, CUDA graphs, recording.

A policy is put in force through five files: `tltlab.policies.policy` reads its file, `tltlab.policies.specs` builds the
selector, `engine` (or `vllm.options`, for an engine of one's own) hands it to the engine core, `control` seats it and
asks it once per iteration, and `vllm.scheduler` does what it says. The way back, what became of each choice, is
`ledger`.
"""
