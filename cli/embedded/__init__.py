"""Third-party servers and child processes of a cluster that runs on one machine.

`children` keeps a set of processes alive and leaves none behind; `etcd` and `seaweed` know how to start, probe and
describe the two servers Segue stores into; `ports` finds loopback ports for them. `segue up` and the tests use the
same code, so what a test proves about a real etcd or S3 server holds for the embedded cluster as well.
"""

import os

# Children are started while gRPC channels are open, and gRPC's fork handlers may crash them between fork and exec.
# Nothing here forks without exec. Read when gRPC is first used, so it stands before anything that imports it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
