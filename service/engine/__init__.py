"""The engine process: batches requests and runs them on one device."""
