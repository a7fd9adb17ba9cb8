"""The image's health check: exit with status 0 if the server in this container is ready."""

import http.client
import os
import socket
import ssl
import sys

if path := os.environ.get("GRADSERVE_SOCKET"):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(4)
    connection.sock.connect(path)
elif os.environ.get("GRADSERVE_TLS_CERTIFICATE"):
    # The certificate names another host than this address. Clients check the certificate.
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection("127.0.0.1", int(os.environ["GRADSERVE_PORT"]), timeout=4, context=context)
else:
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ["GRADSERVE_PORT"]), timeout=4)
connection.request("GET", "/v2/health/ready")
sys.exit(connection.getresponse().status != 200)
