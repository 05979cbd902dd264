"""Tests of service/frontend/oip."""
