# expect: memory|error|denied|crashed|timeout | kind: reward | observe: mapped and shared memory counts, anonymous files of memory are refused
import mmap


def evaluate(messages, ground_truth=None, **rest):
    keep = []
    while True:
        block = mmap.mmap(-1, 64 << 20)
        block[:: 4096] = b"x" * len(range(0, 64 << 20, 4096))
        keep.append(block)
