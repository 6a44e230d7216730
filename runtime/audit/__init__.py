"""Is speculative decoding lossless? Sampled and exact comparisons of an engine with and without it."""
