"""What is learnt, and the store that shares it.

May import: knows neither torch nor Ray, and imports nothing of actors or cluster.
"""
