"""A client of Python's standard library that sends requests through a gateway: python3 client.py PORT LIMIT.

Exits with an assertion error if a response is wrong. `/limited` has a limit per `X-User-Id`, for an hour from the first
request.
"""

import http.client
import sys
import urllib.error
import urllib.request

PORT, LIMIT = int(sys.argv[1]), int(sys.argv[2])


def rate_limit(headers):
    """Returns the name, the remaining units and the reset time of the RateLimit header."""
    name, *parameters = headers["RateLimit"].split(";")
    values = dict(parameter.split("=") for parameter in parameters)
    return name, int(values["r"]), int(values.get("t", 0))


def check_denied(status, reason, headers, body):
    assert (status, reason) == (429, "Too Many Requests"), (status, reason)
    assert headers.get_content_type() == "application/problem+json", headers
    retry_after = int(headers["Retry-After"])
    assert 3500 < retry_after <= 3600, headers
    name, left, seconds = rate_limit(headers)
    assert (name, left) == ('"per-user"', 0), headers
    assert 3500 < seconds <= retry_after, headers
    assert headers["RateLimit-Policy"] == f'"per-user";q={LIMIT};w=3600', headers
    assert len(body) == int(headers["Content-Length"]), (body, headers)


def keep_alive():
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    connection.connect()
    socket = connection.sock
    for left in reversed(range(LIMIT)):
        connection.request("GET", "/limited", headers={"X-User-Id": "one"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"hello"), response.status
        assert rate_limit(response.headers)[:2] == ('"per-user"', left), response.headers
        assert response.getheader("Retry-After") is None, response.headers
    # A denied request keeps the connection open, and later requests on it are served.
    for _ in range(3):
        connection.request("GET", "/limited", headers={"X-User-Id": "one"})
        response = connection.getresponse()
        check_denied(response.status, response.reason, response.headers, response.read())
    connection.request("GET", "/limited", headers={"X-User-Id": "another"})
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"hello"), response.status
    assert connection.sock is socket, "the connection was closed in between"
    chunked(connection)
    assert connection.sock is socket, "the connection was closed in between"


def chunked(connection):
    """A body of unknown length is forwarded in chunks, and so is its echo."""
    parts = [bytes([number]) * size for number, size in enumerate([1, 70_000, 3, 16_384, 200_000])]
    connection.request("POST", "/echo", body=iter(parts), encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 200, response.status
    assert response.getheader("Transfer-Encoding") == "chunked", response.headers
    assert response.read() == b"".join(parts), "the echo differs from the body"


def with_urllib():
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/limited", headers={"X-User-Id": "two"})
    for _ in range(LIMIT):
        with urllib.request.urlopen(request, timeout=30) as response:
            assert (response.status, response.read()) == (200, b"hello"), response.status
    try:
        urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as denied:
        check_denied(denied.code, denied.reason, denied.headers, denied.read())
    else:
        raise AssertionError("more requests than the limit were allowed")


keep_alive()
with_urllib()
