"""The buffers over HTTP: `/v1/buffers`."""
