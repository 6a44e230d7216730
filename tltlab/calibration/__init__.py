"""Traces and measurements as fits of cost and acceptance models take them, and errors on what was left out."""
