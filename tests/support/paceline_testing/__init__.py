"""Stand-ins for the parts that a test does not want to start; Ray workers can import them, too."""
