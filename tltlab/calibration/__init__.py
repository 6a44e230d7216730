"""Cost and acceptance models fitted to traces and measurements, with held-out errors."""
