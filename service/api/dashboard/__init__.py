"""What the page at `/` shows, for scripts too."""
