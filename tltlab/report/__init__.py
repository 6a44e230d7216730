"""The HTML report of a run, timelines and Perfetto traces."""
