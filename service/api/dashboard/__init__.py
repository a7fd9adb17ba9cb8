"""The page over the running server, and its endpoints: statistics of buffers."""
