"""Who may call: registry, keys, limits, and which namespaces a tenant shares.

May import: configuration and validation; actors; cache_service.
"""
