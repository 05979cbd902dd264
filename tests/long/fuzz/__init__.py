"""A fuzzer for every parser of bytes from clients. `python -m tests.long.fuzz` runs one target for longer than test_fuzz.py."""
