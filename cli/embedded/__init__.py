"""Third-party servers and child processes of a cluster that runs on one machine.

`children` keeps a set of processes alive and leaves none behind; `etcd` and `seaweed` know how to start, probe and
describe the two servers Segue stores into; `ports` finds loopback ports for them. `segue up` and the tests use the
same code, so what a test proves about a real etcd or S3 server holds for the embedded cluster as well.
"""
