"""Runs a router core and its engines in one process, and builds corpora.

May import: router, cache, text; never the gateway.
"""
