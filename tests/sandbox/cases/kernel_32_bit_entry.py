# expect: crashed|denied|error | kind: reward | observe: the 32-bit entry of the kernel ends the process
import ctypes
import mmap


def evaluate(messages, ground_truth=None, **rest):
    # mov eax, 20 (getpid of the 32-bit machine); int 0x80; ret
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    number = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    return {"score": 0.0, "breach": [f"getpid by int 0x80: {number}"] if number > 0 else [], "denied": ["int 0x80"]}
