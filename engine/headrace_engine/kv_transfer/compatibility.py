"""Decides which engines can exchange KV. They need the same weights, settings and versions, and
tensor-parallel sizes and cache layouts between which NIXL's connector can copy heads.

vLLM's connector compares much of this when two engines connect, and then fails the pull. During a
rolling change of model, settings or version, that would happen to every pair of an old and a new
replica. So each replica announces its kind: gateways never plan such a pair, and a prefill replica
refuses a prompt whose KV the caller could not pull.

The rules of vLLM 0.32's pull connector (`TransferTopology`, `_validate_remote_agent_handshake`):

    sizes                       one divides the other
    layouts                     equal
    sizes differ                a head's tokens lie together in a block: LBHNC ("HND") or BLHNC
    prefill has more ranks      it has no more ranks than KV heads
    MLA                         no rule but the first: each rank has all of the KV

`enable_permute_local_kv`, an experiment of vLLM's with different layouts, is refused: fingerprints
would differ. Different sizes are refused, too, if the puller wants every transfer checked byte for
byte. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b

CHECKS_KEY = "headrace_integrity"
"""Key in a connector's settings: which transfers are checked (`pull_proof.settings`)."""
UNIDENTIFIED = "unidentified"
"""The digest of an engine whose KV has no identity."""
SPLITTABLE = "LBHNC", "BLHNC"
"""vLLM's cache layouts out of which single heads can be copied."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """Properties of an engine that decide with which others it can exchange KV.

    Attributes:
        digest: of everything that two engines must have in common, 16 hex digits.
        ranks: tensor-parallel size.
        heads: KV heads of all ranks; 0 for MLA, where each rank has all.
        layout: vLLM's name of the cache's layout; empty if it is not known.
        check_all: whether it wants every transfer checked byte for byte.
        why_unidentified: why the engine's KV has no identity; empty if it has one. Not sent.
    """

    digest: str
    ranks: int = 1
    heads: int = 0
    layout: str = ""
    check_all: bool = False
    why_unidentified: str = field(default="", compare=False)

    def of_epoch(self, epoch: str) -> KvKind:
        """Return the kind of the same engine after a reset of its caches. `epoch` is empty before
        any reset."""
        if not epoch or self.digest == UNIDENTIFIED:
            return self
        hashed = blake2b(f"{self.digest} {epoch}".encode(), digest_size=8)
        return replace(self, digest=hashed.hexdigest())

    def __str__(self) -> str:
        """Return the kind as the text that replicas send."""
        fields = self.digest, self.ranks, self.heads, self.layout, int(self.check_all)
        return "/".join(map(str, fields))

    @classmethod
    def parse(cls, text: str) -> KvKind:
        """Return the kind in a replica's text. A text of another version counts as a digest."""
        parts = text.split("/")
        if len(parts) == 5 and all(parts[i].isdecimal() for i in (1, 2, 4)) and int(parts[1]):
            digest, ranks, heads, layout, check_all = parts
            return cls(digest, int(ranks), int(heads), layout, check_all != "0")
        return cls(text)


def refusal(prefill: str, decode: str) -> str:
    """Return why a decode engine cannot pull KV from a prefill engine; empty if it can.

    Args:
        prefill, decode: `KvKind`s as text; empty for an engine that announces none and takes any.
    """
    there, here = KvKind.parse(prefill), KvKind.parse(decode)
    if UNIDENTIFIED in (there.digest, here.digest):
        return "weights or settings of an engine cannot be told from others; its log says why"
    if not prefill or not decode or prefill == decode:
        return ""
    if there.digest != here.digest:
        return "weights, settings or versions differ: a change is rolling"
    if there.layout and here.layout and there.layout != here.layout and here.heads:
        return (
            f"the prefill engine's KV cache has layout {there.layout}, the decode engine's "
            f"{here.layout}; set the same VLLM_KV_CACHE_LAYOUT for both"
        )
    if there.ranks == here.ranks:
        return ""
    sizes = f"tensor_parallel_size is {there.ranks} for prefill and {here.ranks} for decode"
    if there.ranks % here.ranks and here.ranks % there.ranks:
        return f"{sizes}; one must be a multiple of the other"
    if here.check_all:
        return f"{sizes}; integrity.check: all compares KV of equal sizes only, set sampled"
    if not here.heads:
        return ""
    if there.ranks > max(here.ranks, here.heads):
        return f"{sizes}; with {here.heads} KV heads, prefill may have {here.heads} at most"
    if there.ranks <= here.heads and here.layout not in SPLITTABLE:
        return (
            f"{sizes}; that needs a KV cache of layout {' or '.join(SPLITTABLE)}, and this one has "
            f"{here.layout or 'an unknown one'}; set VLLM_KV_CACHE_LAYOUT=HND for both"
        )
    return ""


def pieces(prefill_ranks: int, decode_ranks: int, heads: int) -> int:
    """Return the number of parallel transfers into which a prompt's KV is cut. A rank that shares
    its heads with others pulls as much as they do.

    Args:
        heads: KV heads of all ranks; 0 for MLA.
    """
    return max(1, min(heads, max(prefill_ranks, decode_ranks)))
