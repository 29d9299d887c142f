"""Administration of the shared cache: what the commands `paceline cache` and its HTTP server do.

May import: cluster.cache, tenants, text.
"""
