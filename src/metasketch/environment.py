"""The setting in which numbers are made, and put back afterwards.

What changes rounding is set here and nowhere else: the number of threads, TF32, the choice of
kernels. A run records the number of threads; its sweeps obey it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import torch

from metasketch.randomness import preserved


@contextlib.contextmanager
def computing(device: torch.device, num_threads: int, cudnn: bool = True) -> Iterator[None]:
    """Deterministic, differentiable arithmetic with this many threads, whatever is set outside.

    The ambient generators are preserved.

    Args:
        cudnn: False for models with recurrent layers, which have no double backward there.
    """
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if before != num_threads:
            torch.set_num_threads(num_threads)
            stack.callback(torch.set_num_threads, before)
        if device.type == "cuda":
            stack.enter_context(_deterministic_cuda(cudnn))
        yield


@contextlib.contextmanager
def _deterministic_cuda(cudnn: bool) -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = False
        with torch.backends.cudnn.flags(
            enabled=cudnn, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        torch.backends.cuda.matmul.allow_tf32 = tf32


def synchronize(device: torch.device) -> None:
    """Wait for what was started on a device, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stopwatch(device: torch.device) -> Callable[[], float]:
    """A clock for durations of work on a device, in seconds.

    Where one thread computes it is the process's own time, which leaves out what other processes
    take of a shared core; choices made by wall-clock time there were wrong under load.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def now() -> float:
        synchronize(device)
        return clock()

    return now
