"""Direct ZeroMQ links between router, target group and draft workers.

May import: messages and errors.
"""
