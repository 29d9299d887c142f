"""`paceline cache`: looks after what is stored in the shared cache.

May import: what its parent may.
"""
