"""What processes say to each other, and the shared memory between them."""
