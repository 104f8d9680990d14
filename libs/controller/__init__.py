"""The continuation controller: pure machines, routing policy and discovery. No I/O, no clock, no randomness.

`protocol` and `catalog_facts` hold the values; `router` and `worker` are the machines (events in, effects out);
`candidates` and `policy` rank; `discovery` and `residency` keep what workers say of themselves; `wire` is the only seam
to the encoded messages.
"""
