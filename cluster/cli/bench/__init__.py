"""`paceline bench`: speed of the local engine, of a server, and worth of the shared cache.

May import: what its parent may.
"""
