# expect: timeout | kind: reward | observe: every signal is blocked and threads go on while the function waits for a lock nobody frees
import signal
import threading


def evaluate(messages, ground_truth=None, **rest):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, daemon=True).start()
    while True:
        try:
            lock.acquire()
        except BaseException:
            continue
