"""The HTTP edge, and the only place that knows FastAPI and pydantic."""
