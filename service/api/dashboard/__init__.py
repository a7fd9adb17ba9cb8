"""The page at `/`, and what it shows, for scripts too."""
