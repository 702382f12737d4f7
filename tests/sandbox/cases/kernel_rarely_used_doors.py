# expect: denied | kind: reward | observe: keyrings, BPF, performance events, io_uring, userfaultfd, System V objects and the like are shut
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def system_call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


buffer = ctypes.create_string_buffer(4096)
NUMBERS = {
    "add_key": (248, b"user", b"@MARK@", b"x", 1, -3),
    "request_key": (249, b"user", b"@MARK@", None, -3),
    "keyctl": (250, 0, -3, 0),
    "bpf": (321, 0, buffer, 64),
    "perf_event_open": (298, buffer, 0, -1, -1, 0),
    "io_uring_setup": (425, 4, buffer),
    "userfaultfd": (323, 0),
    "shmget": (29, 0, 4096, 0o1600),
    "semget": (64, 0, 1, 0o1600),
    "msgget": (68, 0, 0o1600),
    "mq_open": (240, b"@MARK@", 0o102, 0o600, None),
    "memfd_create": (319, b"x", 0),
    "memfd_secret": (447, 0),
    "inotify_init": (253,),
    "fanotify_init": (300, 0, 0),
    "personality": (135, 0x0040000),
    "modify_ldt": (154, 0, buffer, 16),
    "quotactl": (179, 0, None, 0, None),
    "kexec_load": (246, 0, 0, None, 0),
    "init_module": (175, None, 0, b""),
    "acct": (163, None),
    "syslog": (103, 3, buffer, 100),
    "lookup_dcookie": (212, 0, buffer, 10),
    "migrate_pages": (256, os.getpid(), 1, buffer, buffer),
    "seccomp": (317, 1, 0, buffer),
    "landlock": (444, None, 0, 1),
    "pkey_alloc": (330, 0, 0),
    "vmsplice": (278, 1, buffer, 1, 0),
    "tee": (276, 0, 1, 1, 0),
    "process_madvise": (440, 0, buffer, 1, 4, 0),
}
ATTEMPTS = {name: lambda arguments=arguments: system_call(*arguments) for name, arguments in NUMBERS.items()}


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
