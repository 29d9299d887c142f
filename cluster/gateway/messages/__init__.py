"""Anthropic's messages over HTTP."""
