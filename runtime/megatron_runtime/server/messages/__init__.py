"""Chat messages: prompts, reasoning and tool calls."""
