"""Tests of service/tracer."""
