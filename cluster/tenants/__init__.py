"""Who may call: registry, keys, limits, and which namespaces a tenant shares.

May import: the configuration, validation, names of namespaces in cache_service.
"""
