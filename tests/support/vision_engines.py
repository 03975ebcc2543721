"""vLLM engines that see images, each in a process of its own, one at a time.

    engines = VisionEngines()
    engines.do("open", model=..., hands_over=True)
    engines.do("answers", prompts=[{"text": "...", "seed": 3}], max_tokens=8)

A prompt is a text before and after a picture (`tiny_vision.picture`), which the engine's own
frontend renders; or {"tokens", "media"}, as a decode replica sends them to a prefill replica.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kvstore.child import Child, serve
from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, pull_params
from headrace_engine.kv_transfer.media import encode_media, prompt_with_media
from headrace_engine.vllm.llm import process_media_by_tenant
from tests.support import run
from tests.support.connectors import side_channel
from tests.support.cross_layer_models import Engines
from tests.support.forked import Forked
from tests.support.program import IN_ONE_PROCESS, engine_environment
from tests.support.tiny_vision import picture


class VisionEngines:
    """A process for engines, one at a time, that may hand KV over by NIXL."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        environment = engine_environment(**IN_ONE_PROCESS) | side_channel()
        run.engine_started()
        log = Path(self._folder.name) / "log"
        self._child = Child("vision_engines", {}, environment, log, "tests.support.", Forked)
        self._child.answer()

    def do(self, action: str, **parameters: Any) -> Any:
        """Call a method of `SeeingEngines`. Raises RuntimeError if it failed."""
        return self._child.do(action, **parameters)

    def end(self) -> None:
        """End the engine and its process."""
        self._child.end()
        self._folder.cleanup()


class SeeingEngines(Engines):
    """The process's part."""

    def open(self, *args: Any, **options: Any) -> int:
        """Start an engine, and count the images that its encoder computes."""
        blocks = super().open(*args, skip_tokenizer_init=False, **options)
        self._tenant = "a"
        process_media_by_tenant(self._llm.llm_engine, lambda: self._tenant)
        self._encoded = 0
        runner = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        model = runner.worker.model_runner.get_model()
        encode = model.embed_multimodal

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = encode(*args, **kwargs)
            self._encoded += len(found)
            return found

        model.embed_multimodal = counted
        return blocks

    def encoded(self) -> int:
        """Number of images that the encoder has computed since the last call."""
        count, self._encoded = self._encoded, 0
        return count

    def sent(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the prompts as a decode replica sends them to a prefill replica."""
        rendered = [self._rendered(prompt) for prompt in prompts]
        return [
            {
                "tokens": list(prompt["prompt_token_ids"]),
                "media": base64.b64encode(encode_media(prompt)).decode(),
            }
            for prompt in rendered
        ]

    def answers(  # type: ignore[override]
        self,
        prompts: list[dict[str, Any]],
        max_tokens: int,
        transfers: list[dict[str, Any]] | None = None,
        earlier: list[list[int]] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy answers to prompts, all at once.

        Args:
            transfers: as `Engines.answers` has them.
            earlier: for each prompt, the first tokens of its answer, which a lost engine gave.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for number, prompt in enumerate(prompts):
            extra: dict[str, Any] = {}
            if transfers is not None:
                extra[PARAMS_KEY] = pull_params(transfers[number])
            if earlier is not None:
                extra[RESUME_TOKENS] = earlier[number]
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra or None,
            )
            engine.add_request(str(number), self._rendered(prompt), params)
        found: dict[int, dict[str, Any]] = {}
        while engine.has_unfinished_requests():
            for result in engine.step():
                if result.finished:
                    found[int(result.request_id)] = {
                        "tokens": list(result.outputs[0].token_ids),
                        "cached": result.num_cached_tokens,
                        "prompt_tokens": len(result.prompt_token_ids),
                        "transfer": result.kv_transfer_params,
                    }
        return [found[number] for number in range(len(prompts))]

    def _rendered(self, prompt: dict[str, Any]) -> Any:
        if "tokens" in prompt:
            sent: Any = prompt_with_media(prompt["tokens"], base64.b64decode(prompt["media"]))
            return {**sent, "cache_salt": "t"}
        from vllm.renderers import ChatParams

        renderer = self._llm.llm_engine.renderer
        parts = [
            {"type": "text", "text": prompt["text"]},
            {"type": "image_url", "image_url": {"url": picture(prompt["seed"])}},
            {"type": "text", "text": "What is it?"},
        ]
        messages: Any = [{"role": "user", "content": parts}]
        rendering = renderer.render_chat_async(
            [messages], ChatParams(), renderer.default_chat_tok_params
        )
        _, [rendered] = asyncio.run(rendering)
        return {**rendered, "cache_salt": "t"}


def main() -> None:
    argparse.ArgumentParser().parse_args()
    serve(SeeingEngines)


if __name__ == "__main__":
    main()
