"""Response-length distributions: the model, its fit to recorded lengths, traces generated from it."""
