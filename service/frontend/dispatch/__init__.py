"""Engine connections and the choice of an engine."""
