"""OpenAI's API under /v1: each agent is a model. Chat completions, responses and the list of models."""
