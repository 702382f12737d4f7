"""What every test runs under."""

from __future__ import annotations

import torch

# With two threads on two busy cores, OpenMP's spinning makes tiny models twenty times slower.
torch.set_num_threads(1)
