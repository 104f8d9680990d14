"""Who owns which page of the device, and what can be found there again: pure bookkeeping, no tensors, no I/O."""
