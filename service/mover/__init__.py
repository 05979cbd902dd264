"""The mover: it moves the states of sessions between replicas, and saves them in a store of checkpoints."""
