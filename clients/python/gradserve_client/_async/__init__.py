"""The asynchronous client. Most of it is generated from the synchronous client."""
