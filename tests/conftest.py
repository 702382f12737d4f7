"""What every test runs under."""

from __future__ import annotations

import signal

import torch

# With two threads on two busy cores, OpenMP's spinning makes tiny models twenty times slower.
torch.set_num_threads(1)

# A shell without job control has what it runs in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
