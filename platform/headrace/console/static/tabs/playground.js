// A chat with the served model, and how its answer came: time to first token, speed, plan.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { getPlan } from "../lib/api.js";
import { streamChat } from "../lib/chat.js";
import { count, number, seconds } from "../lib/format.js";
import { Alert, Card } from "../widgets/layout.js";
import { Plan } from "../widgets/plan.js";

export function Playground({ models }) {
  const [chosen, setModel] = useState("");
  const model = models.includes(chosen) ? chosen : models[0];
  const [messages, setMessages] = useState([]);
  const [text, setText] = useState("");
  const [temperature, setTemperature] = useState(0.7);
  const [maxTokens, setMaxTokens] = useState(256);
  const [run, setRun] = useState(null);
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);

  const ask = async (event) => {
    event.preventDefault();
    if (!text.trim() || run?.isRunning) return;
    const asked = [...messages, { role: "user", content: text.trim() }];
    abort.current = new AbortController();
    let answer = "";
    let measured = { isRunning: true };
    setMessages([...asked, { role: "assistant", content: "" }]);
    setText("");
    setRun(measured);
    const told = (more) => { measured = { ...measured, ...more }; setRun(measured); };
    try {
      await streamChat({ model, messages: asked, temperature, max_tokens: maxTokens }, abort.current.signal, {
        onId: (id) => told({ id }),
        onText: (piece) => { answer += piece; setMessages([...asked, { role: "assistant", content: answer }]); },
        onTimes: told,
      });
      told({ isRunning: false });
    } catch (problem) {
      told({ isRunning: false, ...(problem.name === "AbortError" ? { note: "Stopped." } : { error: problem.message }) });
    }
    if (!answer) setMessages(asked);
    if (measured.id && !measured.error) {
      await getPlan(measured.id).then((plan) => told({ plan }), (problem) => told({ planError: problem.message }));
    }
  };
  const onKey = (event) => { if (event.key === "Enter" && !event.shiftKey) ask(event); };
  return html`<div class="grid beside">
    <${Card} title="Chat" id="chat">
      <div class="messages" role="log" aria-label="Conversation" tabindex="0">${messages.length ? messages.map((message) => html`<div class="message ${message.role}"><b>${message.role === "user" ? "You" : model}</b><p>${message.content || "..."}</p></div>`)
        : html`<p class="soft">Ask the model something. The request goes through the gateway like any client's, with your key.</p>`}</div>
      ${run?.error && html`<${Alert}>${run.error}<//>`}
      <form onSubmit=${ask}>
        <label for="prompt">Message</label>
        <textarea id="prompt" rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey} placeholder="Enter sends, Shift and Enter begin a new line"></textarea>
        <div class="filters">${models.length > 1 && html`<label>Model <select id="model" value=${model} onChange=${(event) => setModel(event.target.value)}>${models.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`}
          <label>Temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(event) => setTemperature(Number(event.target.value))} /></label>
          <label>Maximum tokens <input id="max-tokens" type="number" min="1" step="1" value=${maxTokens} onInput=${(event) => setMaxTokens(Number(event.target.value))} /></label></div>
        <p class="buttons"><button type="submit" class="primary" id="send" disabled=${run?.isRunning}>Send</button>
          <button type="button" id="stop" disabled=${!run?.isRunning} onClick=${() => abort.current?.abort()}>Stop</button>
          <button type="button" class="quiet" disabled=${run?.isRunning || !messages.length} onClick=${() => { setMessages([]); setRun(null); }}>New chat</button></p></form><//>
    <${Card} title="How the answer came" id="answer">${run ? html`<${Result} run=${run} />` : html`<p class="soft">The time to first token, the speed and the request's plan stand here after the first answer.</p>`}<//></div>`;
}

function Result({ run }) {
  const speed = run.tokens > 1 && run.total_s > run.ttft_s ? (run.tokens - 1) / (run.total_s - run.ttft_s) : null;
  return html`<dl class="facts" id="chat-facts"><dt>Time to first token</dt><dd>${seconds(run.ttft_s)}</dd><dt>Speed</dt><dd>${speed === null ? "-" : `${number(speed)} tokens/s`}</dd>
      <dt>Answer</dt><dd>${count(run.tokens)} tokens in ${seconds(run.total_s)}</dd><dt>Prompt</dt><dd>${count(run.promptTokens)} tokens${run.cachedTokens ? `, ${count(run.cachedTokens)} of them cached` : ""}</dd>
      ${run.id && html`<dt>Request</dt><dd><a href=${`#requests/${encodeURIComponent(run.id)}`}>${run.id}</a></dd>`}</dl>
    <p role="status" class="soft">${run.isRunning ? "The answer comes ..." : (run.note ?? "")} As this browser measured it.</p>
    ${run.planError && html`<p class="soft">No plan: ${run.planError}</p>`}
    ${run.plan && html`<h3>Plan</h3><${Plan} plan=${run.plan} request=${{ queue_s: 0, ttft_s: run.ttft_s, total_s: run.total_s }} />`}`;
}
