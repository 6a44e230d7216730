"""Traces made of other programs' logs: verl, TRL and vLLM dumps, plain response files, CSV of lengths."""
