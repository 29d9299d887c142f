"""Soft n-gram counts and their exchange between routers.

May import: log, store, formats.
"""
