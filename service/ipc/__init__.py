"""Messages between processes, and the shared memory between them."""
