"""Model-free drafters (n-gram, suffix), draft budgets by request, the names of drafters."""
