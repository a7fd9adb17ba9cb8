"""Headers of the requests that the tests of buffers make."""

from __future__ import annotations

from service.codecs.safetensors import MEDIA_TYPE

SAFE = {"Content-Type": MEDIA_TYPE}
TO_SAFETENSORS = {"Accept": MEDIA_TYPE}
KEY = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
