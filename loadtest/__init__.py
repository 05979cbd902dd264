"""Load tests of a running server: realistic traffic, measurements, and other servers to compare with."""
