"""Millions of requests with known answers while engines are killed: `python -m tests.long.endurance sessions --size 10000000`.

`load` keeps many connections busy. `sessions` and `requests` build the requests and check the answers. `faults` kills engines and replaces
versions.
"""
