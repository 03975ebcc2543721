"""A structured output backend for vLLM that compiles a grammar with xgrammar or guidance.

A vLLM engine has one backend, which its first grammar determines. A schema that only guidance
enforces may then be compiled by xgrammar, which ignores a part of it. A tool call's grammar may be
compiled by guidance, which does not know it. Both backends write the same bit mask, so that one
engine can use both, and this one chooses the backend that enforces the grammar.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from headrace_decode.grammars.keywords import unenforced
from headrace_engine.vllm.structured_output import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
    backend_class,
    needs_guidance,
)

logger = logging.getLogger("headrace.decode")

WARM_UP = (
    '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}',
    '{"type": "string", "pattern": "^[a-z]+$"}',
    '{"type": "array", "items": {"type": "number", "minimum": 1}}',
)
MASK_BITS = 32
"""Number of bits in one number of a mask."""


class CombinedBackend(StructuredOutputBackend):
    """xgrammar, and guidance for schemas that xgrammar does not enforce or compile.

    Args:
        vllm_config: the engine's configuration.
        tokenizer: the model's tokenizer.
        vocab_size: number of tokens in the model's vocabulary.
    """

    def __init__(self, vllm_config: Any, tokenizer: Any, vocab_size: int) -> None:
        self.vllm_config, self.tokenizer, self.vocab_size = vllm_config, tokenizer, vocab_size
        self._made: dict[str, StructuredOutputBackend] = {}
        self._making = threading.Lock()

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Compile with the backend that enforces the grammar.

        Raises:
            Exception: neither backend can.
        """
        asked = request_type, grammar_spec
        if request_type == StructuredOutputOptions.JSON and unenforced(json.loads(grammar_spec)):
            return self._guidance.compile_grammar(*asked, stop_token_ids=stop_token_ids)
        if request_type == StructuredOutputOptions.GRAMMAR and needs_guidance(
            self.tokenizer, grammar_spec
        ):
            return self._guidance.compile_grammar(*asked, stop_token_ids=stop_token_ids)
        try:
            return self._xgrammar.compile_grammar(*asked, stop_token_ids=stop_token_ids)
        except Exception:
            if request_type == StructuredOutputOptions.STRUCTURAL_TAG:
                raise
            return self._guidance.compile_grammar(*asked, stop_token_ids=stop_token_ids)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        """Return masks of the vocabulary for so many rows."""
        return self._xgrammar.allocate_token_bitmask(max_num_seqs)

    def destroy(self) -> None:
        """Destroy both backends."""
        for backend in self._made.values():
            backend.destroy()

    def prepare(self, *, wait: bool = False) -> None:
        """Make both backends now, since requests would have to wait for them later.

        This takes 0.2 s and 0.7 s with a vocabulary of 49,152.

        Args:
            wait: whether to wait until they are made; otherwise a thread makes them.
        """
        if not wait:
            thread = threading.Thread(target=self.prepare, kwargs={"wait": True}, daemon=True)
            thread.start()
            return
        for name in ("_xgrammar", "_guidance"):
            try:
                self._warm(getattr(self, name))
            except Exception as error:
                logger.warning("a backend for grammars is not there: %r", error)

    def _warm(self, backend: StructuredOutputBackend) -> None:
        """Have a backend compute a mask: guidance takes 0.1 s for its first one."""
        mask = backend.allocate_token_bitmask(1)
        for schema in WARM_UP:
            grammar = backend.compile_grammar(StructuredOutputOptions.JSON, schema)
            grammar.fill_bitmask(mask, 0)

    @property
    def _xgrammar(self) -> StructuredOutputBackend:
        return self._one("xgrammar")

    @property
    def _guidance(self) -> StructuredOutputBackend:
        room = -(-self.vocab_size // MASK_BITS) * MASK_BITS
        if len(self.tokenizer) > room:
            raise ValueError("the tokenizer has more tokens than the model, so only xgrammar works")
        return self._one("guidance")

    def _one(self, name: str) -> StructuredOutputBackend:
        with self._making:
            if name not in self._made:
                self._made[name] = backend_class(name)(
                    self.vllm_config, tokenizer=self.tokenizer, vocab_size=self.vocab_size
                )
            return self._made[name]


def install_combined_backend(manager: Any) -> None:
    """Install `CombinedBackend` in an engine that leaves the choice of the backend to vLLM.

    Args:
        manager: vLLM's `StructuredOutputManager` of an engine that has had no grammar.
    """
    config = manager.vllm_config
    if manager.backend is None and is_backend_automatic(config):
        size = config.model_config.get_vocab_size()
        manager.backend = CombinedBackend(config, manager.tokenizer, size)
        manager.backend.prepare()


def is_backend_automatic(config: Any) -> bool:
    """Return whether vLLM chooses the backend (`structured_outputs_config.backend: auto`)."""
    return (
        config.structured_outputs_config.backend == "auto"
        and not config.model_config.skip_tokenizer_init
    )
