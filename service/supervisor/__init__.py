"""The supervisor process."""
