"""Whether the server in this container is ready, as its exit status: the image's health check."""

import http.client
import os
import ssl
import sys

port = int(os.environ["GRADSERVE_PORT"])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
if os.environ.get("GRADSERVE_TLS_CERTIFICATE"):
    # The certificate is of another name than this address; whether it is good is for clients to judge.
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=ssl._create_unverified_context())
connection.request("GET", "/v2/health/ready")
sys.exit(connection.getresponse().status != 200)
