"""The public face: validates HTTP and gRPC requests, turns text into tokens, calls a router, streams text back.

May import: router (status and messages only), tenants, text.
"""
