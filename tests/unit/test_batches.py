"""Batches through the gateway and OpenAI's client: uploaded, run, read, cancelled, refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from tests.unit.batch_fakes import (
    answers,
    batching,
    line,
    lines_of,
    read_lines,
    slow_echo,
    start_batch,
    until_ended,
)
from tests.unit.gateway_fakes import soon


async def test_every_line_is_answered_in_the_order_of_the_file(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(100)]
    async with batching(tmp_path) as (bench, client):
        made = await start_batch(client, lines_of(texts), metadata={"of": "test"})
        assert (made.status, made.object, made.endpoint) == (
            "validating",
            "batch",
            "/v1/chat/completions",
        )
        done = await until_ended(client, made.id)
        assert (done.status, done.metadata) == ("completed", {"of": "test"})
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
        assert done.error_file_id is None
        lines = await read_lines(client, done.output_file_id)
        assert answers(lines) == {str(number): text for number, text in enumerate(texts)}
        assert [each["custom_id"] for each in lines] == [str(number) for number in range(100)]
        assert all(each["response"]["status_code"] == 200 for each in lines)
        await soon(lambda: bench.app.body_reader.held_bytes == 0)
