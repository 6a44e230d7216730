"""The first minute: what speculation would bring, files that run, every setting."""
