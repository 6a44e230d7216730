"""Experiments that run no model: lengths, costs and drafters are given, and the simulator does the rest."""
