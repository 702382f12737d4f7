# expect: denied | kind: reward | observe: neither a name nor the host's listeners can be looked up or reached
import asyncio
import socket
import urllib.request

ATTEMPTS = {
    "name": lambda: socket.getaddrinfo("localhost", @PORT@),
    "http": lambda: urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=0.5),
    "asyncio": lambda: asyncio.run(asyncio.open_connection("127.0.0.1", @PORT@)),
    "ipv4 in ipv6": lambda: socket.create_connection(("::ffff:127.0.0.1", @PORT@), timeout=0.5),
}


def tried(attempts):
    log = {"score": 0.0, "breach": [], "denied": []}
    for name, attempt in attempts.items():
        try:
            log["breach"].append(f"{name}: {attempt()!r}"[:160])
        except BaseException as error:
            log["denied"].append(f"{name}: {type(error).__name__}")
    return log


def evaluate(messages, ground_truth=None, **rest):
    return tried(ATTEMPTS)
