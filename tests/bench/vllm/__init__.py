"""Benchmarks and checks that know vLLM from inside."""
