"""vLLM's rejection sampler for CPUs, for batches in which not all requests are greedy.

On CPUs, vLLM 0.29 spreads a request's temperature, top_k and top_p over its draft tokens with a
function that writes into a copy of its output (`cpu_triton_utils._expand_kernel_impl` converts all
to int64 and back only the input). The logits are then divided by what the memory happened to hold:
sampled answers follow another distribution, a greedy neighbour may get a wrong token, and top_k may
end the engine. Here the three are applied before, so that nothing is left for that function to do
but to spread whole numbers, which it does in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler


class CpuRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """Takes the place of vLLM's; everything else about it is vLLM's."""

    def __init__(self, sampler: Any, *args: Any) -> None:
        """As vLLM's: the sampler of bonus tokens, the speculative configuration, the device."""
        super().__init__(_BonusSampler(sampler), *args)

    def forward(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        """As vLLM's; temperatures are 0 for greedy requests and 1 for others from here on."""
        if sampling_metadata.all_greedy:
            self.sampler.asked = None
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        self.sampler.asked = sampling_metadata
        whole = (sampling_metadata.temperature != 0).to(torch.int64)
        applied = replace(sampling_metadata, temperature=whole, top_k=None, top_p=None)
        return super().forward(metadata, draft_probs, logits, applied)

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: Any, metadata: Any
    ) -> torch.Tensor:
        """As vLLM's, then temperature, top_k and top_p of each draft token's request.

        Args:
            logits: float32 [draft tokens, vocabulary]; may be changed in place.
        """
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        asked = self.sampler.asked
        if asked is None:
            return logits
        counts = torch.tensor(metadata.num_draft_tokens)

        def spread(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.repeat_interleave(counts)

        temperature = spread(asked.temperature)
        assert temperature is not None
        logits.div_(torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1))
        return apply_top_k_top_p(logits, spread(asked.top_k), spread(asked.top_p))


class _BonusSampler:
    """The sampler of bonus tokens, which still needs to know what was asked for."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.asked: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any, **kwargs: Any) -> Any:
        if self.asked is not None:
            sampling_metadata = replace(
                sampling_metadata,
                temperature=self.asked.temperature,
                top_k=self.asked.top_k,
                top_p=self.asked.top_p,
            )
        return self._sampler(logits=logits, sampling_metadata=sampling_metadata, **kwargs)
