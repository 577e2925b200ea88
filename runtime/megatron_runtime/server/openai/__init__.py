"""OpenAI's routes, and the answers that they give."""
