"""Exchange of promoted and group knowledge between clusters, through an object store.

May import: promotion, store and formats.
"""
