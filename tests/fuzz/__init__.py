"""A fuzzer for every parser of bytes from clients. tests/long/test_fuzz.py runs it; `python -m tests.fuzz` runs one target for longer."""
