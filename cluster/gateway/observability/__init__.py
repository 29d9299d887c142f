"""Metrics of a gateway, the page and port that show them, and traces of calls."""
