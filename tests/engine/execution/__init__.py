"""Tests of batches on a device."""
