"""Tests of service/ipc."""
