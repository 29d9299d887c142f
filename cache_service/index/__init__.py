"""The local index of a router, built from the log and shared by the processes of a machine.

May import: log, store, automata, formats.
"""
