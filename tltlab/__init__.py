"""tltlab: a lab for the long tail of reasoning-RL rollouts."""
