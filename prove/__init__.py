"""One program per claim: `python -m prove 2-demo`, or a whole group, `python -m prove 2`."""

import os

# Claims start processes while gRPC channels are open; see cli.embedded. It must be set before gRPC is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
