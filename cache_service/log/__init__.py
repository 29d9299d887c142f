"""The folded log: publisher, compactor, reader, follower; and the budgets of namespaces.

May import: store and formats.
"""
