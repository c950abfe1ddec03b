"""A client of the standard library that goes through a gateway: python3 client.py PORT LIMIT.

Fails with a line on what was wrong. The limit is on `/limited`, for each `X-User-Id`, in an hour from the first request.
"""

import http.client
import sys
import urllib.error
import urllib.request

PORT, LIMIT = int(sys.argv[1]), int(sys.argv[2])


def told(headers):
    """What the headers of an answer say of the limit: its name, what is left, and for how long."""
    name, *parameters = headers["RateLimit"].split(";")
    values = dict(parameter.split("=") for parameter in parameters)
    return name, int(values["r"]), int(values.get("t", 0))


def check_denied(status, reason, headers, body):
    assert (status, reason) == (429, "Too Many Requests"), (status, reason)
    assert headers.get_content_type() == "application/problem+json", headers
    retry_after = int(headers["Retry-After"])
    assert 3500 < retry_after <= 3600, headers
    name, left, seconds = told(headers)
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
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"hello"), answer.status
        assert told(answer.headers)[:2] == ('"per-user"', left), answer.headers
        assert answer.getheader("Retry-After") is None, answer.headers
    # Nobody who is denied loses the connection, nor does a request that comes after on it.
    for _ in range(3):
        connection.request("GET", "/limited", headers={"X-User-Id": "one"})
        answer = connection.getresponse()
        check_denied(answer.status, answer.reason, answer.headers, answer.read())
    connection.request("GET", "/limited", headers={"X-User-Id": "another"})
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"hello"), answer.status
    assert connection.sock is socket, "the connection was closed in between"
    chunked(connection)
    assert connection.sock is socket, "the connection was closed in between"


def chunked(connection):
    """A body whose length nobody knows before, and that comes back in the same way."""
    parts = [bytes([number]) * size for number, size in enumerate([1, 70_000, 3, 16_384, 200_000])]
    connection.request("POST", "/echo", body=iter(parts), encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    assert answer.getheader("Transfer-Encoding") == "chunked", answer.headers
    assert answer.read() == b"".join(parts), "what came back is something else"


def with_urllib():
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/limited", headers={"X-User-Id": "two"})
    for _ in range(LIMIT):
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert (answer.status, answer.read()) == (200, b"hello"), answer.status
    try:
        urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as denied:
        check_denied(denied.code, denied.reason, denied.headers, denied.read())
    else:
        raise AssertionError("more passed than the limit")


keep_alive()
with_urllib()
