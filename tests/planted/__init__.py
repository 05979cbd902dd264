"""Faults for servers under test: see sitecustomize.py."""

from pathlib import Path

from tests.planted.sitecustomize import STEPS

FOLDER = Path(__file__).parent
__all__ = ["FOLDER", "STEPS"]
