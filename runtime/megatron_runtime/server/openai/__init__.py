"""The routes of OpenAI's API and their responses."""
