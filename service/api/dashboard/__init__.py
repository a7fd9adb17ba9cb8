"""The page at `/`, and the endpoints that only the page needs."""
