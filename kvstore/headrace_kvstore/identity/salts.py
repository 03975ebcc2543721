"""The cache salt of a request: its tenant's, with the technique that its KV belongs to.

vLLM hashes the salt into a prompt's first block, so requests share KV only if their salts are
equal. Where API keys are configured, the salt begins with the tenant that the key proves; the salt
that the client itself sends only divides its tenant further:

    tenant:NAME:SALT            NAME holds no colon, so no two pairs make the same salt

Without keys, the salts that clients send take the place of tenants.

KV that must be isolated from other KV of the same tokens gets a mark in front of all this:

    technique:MARK:...          MARK holds no colon

Blocks under a marked salt live in engines only: the store neither supplies nor keeps them, except
for blocks that an engine saves under names of its own. `EXACT` is one such mark. A request without
a technique has no mark, so its keys are the same as without this module. No client may send a salt
that looks marked.
"""

from __future__ import annotations

EXACT = "exact"
"""Mark of a request that wants only exact KV, in an app whose store also gives lossy KV."""

_PREFIX = "tenant:"
_ISOLATED = "technique:"


def tenant_salt(tenant: str, own: str = "") -> str:
    """Return the salt of a tenant's request; `own` is the salt that the client sent.

    Raises:
        ValueError: a tenant's name is empty or holds a colon.
    """
    if not tenant or ":" in tenant:
        raise ValueError(f"{tenant!r} is no tenant's name: it is empty or holds a colon")
    return f"{_PREFIX}{tenant}:{own}"


def tenant_of(salt: str) -> str:
    """Return the tenant in a salt; the salt itself, without its mark, if it names none."""
    tenant, own = split_salt(unmarked_salt(salt))
    return own if tenant is None else tenant


def unmarked_salt(salt: str) -> str:
    """Return a salt without its mark."""
    return salt[len(_ISOLATED) :].partition(":")[2] if is_isolated(salt) else salt


def split_salt(salt: str) -> tuple[str | None, str]:
    """Return the tenant in an unmarked salt, None if it names none, and the client's own salt."""
    tenant, colon, own = salt.removeprefix(_PREFIX).partition(":")
    named = salt.startswith(_PREFIX) and tenant and colon
    return (tenant, own) if named else (None, salt)


def isolated_salt(salt: str, mark: str) -> str:
    """Return the salt of KV that is shared under this mark only.

    Raises:
        ValueError: the mark is empty or holds a colon, or the salt is marked already.
    """
    if not mark or ":" in mark:
        raise ValueError(f"{mark!r} is no mark: it is empty or holds a colon")
    if is_isolated(salt):
        raise ValueError(f"{salt!r} is marked already")
    return f"{_ISOLATED}{mark}:{salt}"


def is_isolated(salt: str) -> bool:
    """Whether KV under this salt is isolated."""
    return salt.startswith(_ISOLATED)
