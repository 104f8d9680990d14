"""What must be true of a request before it becomes an offer: checked once, for tunnels and direct calls alike."""

from __future__ import annotations

import re

from libs.controller.protocol import GenerationRequest

NO_TENANT = "00" * 32
"""The salt of requests made by hand without a tenant."""

_SALT = re.compile(r"[0-9a-f]{64}")


def fault(request: GenerationRequest) -> tuple[str, str] | None:
    """(problem, remedy) of a request that no worker could run; None for a sound one."""
    if not request.request_id:
        return "request_id is empty", "give every request an id of its own"
    if not request.tokens:
        return "tokens is empty", "give at least one token"
    if request.max_new_tokens < 1:
        return "max_new_tokens is 0", "give at least 1"
    if not 0 <= request.output_start <= len(request.tokens):
        return (
            f"output_start {request.output_start} is beyond the {len(request.tokens)} tokens",
            "give the prompt's length",
        )
    if not _SALT.fullmatch(request.tenant_salt):
        return "tenant_salt is not 64 hex digits", "give the tenant's salt as derived at ingress, or leave it empty"
    return None
