"""One request over HTTP: its connection, its body, its caller, its errors."""
