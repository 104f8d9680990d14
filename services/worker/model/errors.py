"""Errors of finding, converting and loading a model: each carries the value at fault and what to do about it."""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything that can go wrong before a model serves. `remedy` is one sentence for the person who started
    it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


class ModelMissingError(ModelError):
    """The name is neither built in, nor a folder, nor a file, nor a hub id that can be had."""


class HubUnreachableError(ModelError):
    """The name looks like a hub id, is not in the local hub cache, and the hub did not answer."""


class UnsupportedArchitectureError(ModelError):
    """The artifact is readable but its architecture, or one of its features, is not served."""


class ModelFilesError(ModelError):
    """The folder or file exists but lacks, or has damaged, a part that is needed."""


class UnsupportedDeviceError(ModelError):
    """The device or number format asked for is not to be had on this machine."""
