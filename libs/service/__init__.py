"""What every Segue service shares: settings, gRPC bootstrap, health, errors, shutdown order, logs, traces, metrics.

A service's `__main__` is two lines: `main(RouterSettings, build)`, with `build` an async function that registers
servicers and background work on the `Service` it is given (see `lifecycle`).
"""
