"""The vLLM engine under a policy: control of speculation at each step, drafters, CUDA graphs, recording."""
