"""A recorded rollout played on a real engine: planned, run engine by engine, and held against the simulator."""
