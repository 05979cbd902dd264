"""Millions of requests with known answers to a service whose engines are killed: `python -m tests.endurance sessions --size 10000000`.

`load` keeps many connections busy. `sessions` and `requests` know what each answer must be. `faults` kills engines and replaces versions.
"""
