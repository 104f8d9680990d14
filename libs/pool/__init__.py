"""The tunnel pool: a few long-lived tunnels to each endpoint, kept through reconnects, rollouts and quiet nights.

``core.PoolCore`` decides (events in, ``Ready`` out; no clock, no I/O), ``pool.TunnelPool`` obeys over libs.tunnel. The
pool carries opaque frames and knows nothing of its user; see README.md for what each part holds.
"""
