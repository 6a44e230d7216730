"""Search for the policy that is fastest in the simulator."""
