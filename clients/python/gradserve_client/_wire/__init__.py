"""The calls of the API: arguments and arrays become requests, and answers become results."""
