"""Administration of the shared cache: what the commands `paceline cache` and its HTTP server do.

May import: the package around it and what that may import.
"""
