"""The command `paceline`: one module a command, imported when it runs.

May import: everything below it.
"""
