# expect: ok|error|denied|memory | kind: reward | observe: threads end somewhere, and the host does not feel them
import threading
import time


def evaluate(messages, ground_truth=None, **rest):
    threading.stack_size(1 << 16)
    started = 0
    try:
        for started in range(100_000):
            threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
    except (RuntimeError, MemoryError):
        pass
    return {"score": 0.0, "breach": ["100,000 threads"] if started > 50_000 else []}
