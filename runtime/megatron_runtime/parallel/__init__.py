"""One model on many ranks: who is who (pure arithmetic), and what ranks say to each other."""
