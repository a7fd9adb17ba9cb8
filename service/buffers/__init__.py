"""Named accumulation buffers: one protocol, its stores."""
