"""From logits to tokens: edits, grammars, filters and the draw."""
