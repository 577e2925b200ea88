"""One model on many ranks: their layout (pure arithmetic), and the communication between them."""
