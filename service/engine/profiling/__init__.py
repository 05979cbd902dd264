"""Records what an engine does, batch by batch."""
