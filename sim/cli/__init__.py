"""The commands of the simulator."""
