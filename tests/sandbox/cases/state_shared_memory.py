# expect: denied|ok|error | kind: reward | observe: memory and semaphores with a name are refused, or gone with the call
import multiprocessing
from multiprocessing import shared_memory


def tried():
    names = []
    for number in range(4):
        block = shared_memory.SharedMemory(name=f"left_@MARK@_{number}", create=True, size=1 << 16)
        names.append(block.name)
    return names


def evaluate(messages, ground_truth=None, **rest):
    log = {"score": 0.0, "breach": [], "denied": []}
    for name, attempt in {"memory": tried, "semaphore": multiprocessing.Semaphore}.items():
        try:
            attempt()
        except OSError as error:
            log["denied"].append(f"{name}: {error}")
    return log
