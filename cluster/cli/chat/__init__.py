"""`paceline chat`: a conversation in the terminal, with tokens coloured by their source.

May import: what its parent may.
"""
