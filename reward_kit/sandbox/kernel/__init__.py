"""What the sandbox asks of the Linux kernel, through ctypes alone: nothing here imports the rest of the package."""
