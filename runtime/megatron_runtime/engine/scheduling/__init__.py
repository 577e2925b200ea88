"""Which sequences a pass computes, and where their keys and values lie. Pure: no tensor, no event loop."""
