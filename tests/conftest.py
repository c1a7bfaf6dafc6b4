"""Small matrices want one thread; two that wait for each other on a busy machine take ten times as long."""

import torch

torch.set_num_threads(1)
