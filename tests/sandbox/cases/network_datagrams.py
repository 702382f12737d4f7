# expect: denied | kind: reward | observe: a datagram needs no connection; none leaves, also from a socket pair
import array
import socket


def send_to():
    left, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return left.sendto(b"x", "@UNIX@")


def from_stream():
    left, _ = socket.socketpair()
    return left.sendto(b"x", "\0@ABSTRACT@")


def pass_descriptor():
    left, _ = socket.socketpair()
    return left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1]))])


ATTEMPTS = {
    "udp": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @UDPPORT@)),
    "unix datagram": send_to,
    "addressed on a stream": from_stream,
    "descriptor passed": pass_descriptor,
    "abstract": lambda: socket.socket(socket.AF_UNIX).connect("\0@ABSTRACT@"),
    "path": lambda: socket.socket(socket.AF_UNIX).connect("@UNIX@"),
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
