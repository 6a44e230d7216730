"""Tests for lossless speculative decoding: sampled and exact comparisons of an engine with and without it."""
