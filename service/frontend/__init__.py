"""The doors. They translate; the core decides."""
