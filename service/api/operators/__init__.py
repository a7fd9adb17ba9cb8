"""The operators over HTTP: `/v1/ops` and the Open Inference Protocol."""
