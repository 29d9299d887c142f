"""OpenAI's completions and chat completions over HTTP, and vLLM's routes for tokens."""
