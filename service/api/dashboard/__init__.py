"""The page at `/`, and the endpoints that it shows, for scripts too."""
