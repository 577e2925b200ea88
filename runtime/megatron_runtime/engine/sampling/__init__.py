"""From logits to tokens: edits, grammars, filters and Gumbel-max sampling."""
