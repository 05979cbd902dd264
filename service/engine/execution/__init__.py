"""Runs batches on one device."""
