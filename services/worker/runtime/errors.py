"""Errors of the device runtime: each carries the value at fault and what to do about it."""

from __future__ import annotations


class RuntimeRefusalError(ValueError):
    """A job that can never run as given: refused at submission, before any lane or device memory is touched."""


class RuntimeFullError(RuntimeError):
    """The runtime already holds its bound of jobs; submit again when one has ended."""


class RuntimeClosedError(RuntimeError):
    """The device loop has ended; no further job can be submitted."""


class NotFiniteError(ArithmeticError):
    """A row of logits holds NaN: the attention state or the weights are damaged. The job fails, its lane goes on."""
