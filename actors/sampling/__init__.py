"""The token as a function of seed, position and logits, and the walk that verifies a draft tree.

May import: messages and draft_tree; cache_service.
"""
