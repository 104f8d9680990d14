from __future__ import annotations

import os

# Tests here start processes while gRPC channels are open: its fork handlers may crash the child before it execs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
