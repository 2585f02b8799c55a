"""On a Mac, tests compute on MLX's CPU device, as they do on Linux: their tolerances are those of float32 there.

Commands that a test starts as processes of their own take MLX's default device.
"""

import signal
import sys

if sys.platform == "darwin":
    import mlx.core as mx

    mx.set_default_device(mx.cpu)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background so
    signal.signal(signal.SIGINT, signal.default_int_handler)
