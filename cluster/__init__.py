"""What users meet: gateway, router, shared cache, tenants, offline engine, deployment and command line.

May import: actors and cache_service.
"""
