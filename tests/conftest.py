"""One thread, and no deadline where torch sets itself up on first use."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("metasketch", deadline=None)
settings.load_profile("metasketch")
