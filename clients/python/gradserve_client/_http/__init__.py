"""Requests and answers: when to send, how, to which server, and what the answer means."""
