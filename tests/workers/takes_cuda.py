"""The module of a worker that imports what initialises CUDA. Here torch only says that it has."""

import torch

torch.cuda.is_initialized = lambda: True
