// A streamed chat request, measured by the browser.
import { send } from "./api.js";

/**
 * Send a chat and report its parts as they come: `onId` the request's id, `onText` each piece of the answer, `onTimes`
 * {ttft_s, total_s, tokens, promptTokens, cachedTokens}. Raises a Refusal, or the error that the stream ended with.
 */
export async function streamChat(request, signal, { onId, onText, onTimes }) {
  const started = performance.now();
  const elapsed = () => (performance.now() - started) / 1000;
  const answer = await send("POST", "/v1/chat/completions", {
    signal, headers: { accept: "text/event-stream" },
    body: { ...request, stream: true, stream_options: { include_usage: true } },
  });
  const id = answer.headers.get("x-request-id");
  if (id) onId(id);
  let ttft_s = null;
  let tokens = 0;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message ?? "The stream ended with an error.");
    const piece = event.choices?.[0]?.delta?.content ?? "";
    if (piece) {
      ttft_s ??= elapsed();
      tokens += 1;
      onText(piece);
    }
    if (event.usage) tokens = event.usage.completion_tokens ?? tokens;
    onTimes({ ttft_s, total_s: elapsed(), tokens, ...(event.usage ? { promptTokens: event.usage.prompt_tokens, cachedTokens: event.usage.prompt_tokens_details?.cached_tokens } : {}) });
  }
}

/** The JSON documents of a stream of server-sent events, up to `[DONE]`. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
