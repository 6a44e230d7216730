"""First steps: the demo, what speculation would bring, a rehearsal, files that run, every setting."""
