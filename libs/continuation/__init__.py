"""Identity and bytes of a continuation: what a stretch of attention state is called, and how it is stored.

A continuation is cut into chunks of 256 processed tokens. A chunk's name is a hash over everything its values
depend on: the model's weights, architecture, layer layout and numeric recipe (`fingerprint`), the tenant
(`tenancy`), and every token before and in it (`chain`). Layers that keep the same shape of state form a group
(`layout`), and a chunk is one immutable safetensors file per group (`objects`) under a key derived from these names
(`keys`).

Everything here is pure: no clock, no file, no network, no randomness; the same arguments give the same bytes in
every process, on every machine. The encodings are frozen (tests/continuation/golden.json): changing one loses every
cache there is.
"""
