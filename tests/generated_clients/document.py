"""`python -m tests.generated_clients.document` prints the OpenAPI document."""

from __future__ import annotations

import json
import sys

from service.api.server import create_app
from service.settings import Settings

if __name__ == "__main__":
    json.dump(create_app(Settings(store="memory:")).openapi(), sys.stdout, indent=2)
