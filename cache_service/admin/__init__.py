"""What an administrator does to the store: import, export, purge, verify, account.

May import: every other room.
"""
