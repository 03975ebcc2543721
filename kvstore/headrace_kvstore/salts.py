"""The cache salt of a tenant's request, and the tenant of a cache salt.

vLLM hashes the salt into a prompt's first block, so requests share KV only if their salts are
equal. Where API keys are configured, the salt begins with the tenant that the key proves; the salt
that the client itself sends only divides its tenant further:

    tenant:NAME:SALT            NAME holds no colon, so no two pairs make the same salt

Without keys there are no tenants but the salts that clients send.
"""

from __future__ import annotations

_PREFIX = "tenant:"


def salt_of(tenant: str, own: str = "") -> str:
    """The salt of a tenant's request; `own` is what the client sent.

    Raises:
        ValueError: a tenant's name is empty or holds a colon.
    """
    if not tenant or ":" in tenant:
        raise ValueError(f"{tenant!r} is no tenant's name: it is empty or holds a colon")
    return f"{_PREFIX}{tenant}:{own}"


def tenant_of(salt: str) -> str:
    """The tenant in a salt; the salt itself if it names none."""
    if not salt.startswith(_PREFIX):
        return salt
    tenant, colon, _ = salt[len(_PREFIX) :].partition(":")
    return tenant if tenant and colon else salt
