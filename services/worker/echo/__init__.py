"""The echo worker: no model, declared costs, declared tokens; everything else is the real worker."""
