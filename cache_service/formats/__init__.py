"""Bytes in Redis and in files: documents, frames, segments, manifests, keys. Every decoder survives garbage.

May import: nothing but errors.
"""
