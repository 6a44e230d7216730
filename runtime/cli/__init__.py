"""The commands of the runtime."""
