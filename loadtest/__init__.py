"""Load for a running server: traffic like that of real callers, what came of it, and other servers to compare with."""
