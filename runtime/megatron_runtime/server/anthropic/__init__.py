"""The routes of Anthropic's Messages API and their answers."""
