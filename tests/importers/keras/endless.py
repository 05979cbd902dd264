"""Replaces the process that reads the texts of a file: it does not end before its time limit."""

import resource

resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
while True:
    pass
