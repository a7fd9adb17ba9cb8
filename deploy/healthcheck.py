"""The image's health check: exit with status 0 if the server in this container is ready."""

import http.client
import os
import ssl
import sys

port = int(os.environ["GRADSERVE_PORT"])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
if os.environ.get("GRADSERVE_TLS_CERTIFICATE"):
    # The certificate names another host than this address. Clients check the certificate.
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=ssl._create_unverified_context())
connection.request("GET", "/v2/health/ready")
sys.exit(connection.getresponse().status != 200)
