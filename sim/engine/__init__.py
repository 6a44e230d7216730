"""One engine in the simulator: its batch from event to event, regimes of the policy, random draws, what is recorded."""
