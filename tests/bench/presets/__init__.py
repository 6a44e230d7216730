"""How presets were made of published measurements: kernel times, server loads, speed-ups, accept lengths."""
