"""Connects a router to the shared cache, runs the embedded server, and administers what is stored.

May import: tenants, text and configuration; actors; cache_service.
"""
