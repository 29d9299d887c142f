"""Formats of bytes in Redis and in files: documents, frames, segments, manifests, keys. Decoders accept any bytes.

May import: errors alone.
"""
