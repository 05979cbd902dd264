"""The process that saves sessions, and reads them again, so that a slow store never delays an engine."""
