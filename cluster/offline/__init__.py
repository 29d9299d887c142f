"""Runs a router core and its engines in one process, and builds corpora.

May import: router, cache, text and the single modules of cluster below them, never the gateway; actors;
cache_service.
"""
