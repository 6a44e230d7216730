"""The vLLM engine under a policy: control of speculation at each step, drafters, CUDA graphs, recording.

A policy is put in force through six files: `tltlab.policies.policy` reads its file, `tltlab.policies.specs` builds the
selector, `engine` (or `vllm.options`, for an engine of one's own) hands it to the core, `control` asks it through
`tltlab.policies.driver` once per iteration, and `vllm.scheduler` does what it says. `ledger` has the way back: which
iteration verified each choice, and its outcome.
"""
