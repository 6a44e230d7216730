"""Tables of measured step times and kernel times that cost models are fitted to."""
