// Requests in flight and finished, newest first, and the way of one of them.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { getPlan } from "../lib/api.js";
import { clock, count, seconds, shortId } from "../lib/format.js";
import { firstToken, isError } from "../lib/tenants.js";
import { Alert, Card, State, Table } from "../widgets/layout.js";
import { Plan } from "../widgets/plan.js";

const SHOWN = 50;
const STATES = ["all", "running", "finished", "failed"];

/** `part` is the id of the request in the URL, or empty; `onPart` opens another one. */
export function Requests({ requests, part, onPart }) {
  const [text, setText] = useState("");
  const [state, setState] = useState("all");
  const [tenant, setTenant] = useState("");
  const all = allOf(requests.data);
  const tenants = [...new Set(all.map((one) => one.tenant).filter(Boolean))].sort();
  const found = all.filter((one) => hasText(one, text.trim().toLowerCase()) && hasState(one, state) && (!tenant || one.tenant === tenant));
  const explain = useRef(null);
  const open = (event) => { event.preventDefault(); if (explain.current.value.trim()) onPart(explain.current.value.trim()); };
  return html`<div class=${part ? "grid beside" : "grid"}>
    <${Card} title="Requests" id="requests" wide=${!part} note="The requests in flight and the last 200 finished ones of the gateway that answers.">
      <form class="filters" onSubmit=${(event) => event.preventDefault()} role="search" aria-label="Filter of requests">
        <label>Text <input id="filter-text" type="search" value=${text} placeholder="id, route, error, replica" onInput=${(event) => setText(event.target.value)} /></label>
        <label>Status <select id="filter-state" onChange=${(event) => setState(event.target.value)}>${STATES.map((name) => html`<option selected=${name === state}>${name}</option>`)}</select></label>
        <label>Tenant <select id="filter-tenant" disabled=${!tenants.length} onChange=${(event) => setTenant(event.target.value)}><option value="">all</option>${tenants.map((name) => html`<option value=${name} selected=${name === tenant}>${name}</option>`)}</select></label>
      </form>
      <${Failures} all=${all} />
      <${Listing} requests=${requests} found=${found} all=${all} part=${part} onPart=${onPart} />
      <form class="filters" onSubmit=${open}><label>Request id <input id="request" ref=${explain} required placeholder="x-request-id of its answer" /></label> <button type="submit">Explain</button></form><//>
    ${part && html`<${One} key=${part} id=${part} request=${all.find((one) => one.id === part) ?? null} onClose=${() => onPart("")} />`}</div>`;
}

/** How many of the finished requests failed, by status and code. */
function Failures({ all }) {
  const counts = new Map();
  for (const one of all.filter((each) => hasState(each, "failed"))) {
    const name = one.status === 499 ? "client left" : `${one.status} ${one.error ?? ""}`.trim();
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  if (!counts.size) return null;
  const told = [...counts].sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} (${count(n)})`);
  return html`<p id="failures">Not answered as asked: ${told.join(", ")}</p>`;
}

function Listing({ requests, found, all, part, onPart }) {
  if (!requests.data) return requests.error ? html`<${Alert}>The requests are not known: ${requests.error.message}<//>` : html`<p class="soft" role="status">Asking the gateway ...</p>`;
  return html`<p class="soft" role="status">${requests.error ? `No answer: ${requests.error.message} ` : ""}${all.length ? `${count(found.length)} of ${count(all.length)} requests${found.length > SHOWN ? `; the first ${SHOWN} are shown` : ""}` : ""}</p>
    <${Table} label="Requests" none=${all.length ? "No request fits the filter." : "No request yet. Send one from the Playground tab."}
      columns=${[{ name: "Request" }, { name: "Time", minor: true }, { name: "Status" }, { name: "Route", minor: true }, { name: "Tenant", minor: true }, { name: "Queue", right: true, minor: true, title: "Wait in the gateway's admission queue" },
        { name: "TTFT", right: true, title: "Time to first token" }, { name: "Total", right: true, title: "Until now for requests in flight" }, { name: "Tokens", right: true, minor: true }, { name: "Replica", minor: true }]}
      rows=${found.slice(0, SHOWN).map((one) => ({ key: one.id, selected: one.id === part, cells: [
        html`<button type="button" class="link" aria-pressed=${one.id === part} title=${one.id} onClick=${() => onPart(one.id)}>${one.id.length > 20 ? `${one.id.slice(0, 18)}…` : one.id}</button>`,
        clock(one.at), stateOf(one), one.path, one.tenant ?? "-", seconds(one.queue_s), seconds(firstToken(one)), seconds(one.total_s ?? one.age_s), count(one.tokens), shortId(one.replica || "-")] }))} />`;
}

const isRunning = (one) => one.total_s === undefined;

/** All requests, newest first. */
function allOf(data) {
  if (!data) return [];
  return [...[...data.in_flight].reverse(), ...data.finished].sort((a, b) => b.at - a.at);
}

const hasText = (one, text) => !text || [one.id, one.path, one.error, one.replica, one.status].some((value) => String(value ?? "").toLowerCase().includes(text));

const hasState = (one, state) => state === "all" || (state === "running" ? isRunning(one) : state === "failed" ? !isRunning(one) && (one.status >= 400 || Boolean(one.error)) : !isRunning(one));

/** The state in words. Only a stream with a first token is known to stream: others may answer in one piece. */
function stateOf(one) {
  if (isRunning(one)) return html`<${State} level="unknown">${one.replica ? (one.ttft_s === null ? "running" : "streaming") : "in the queue"}<//>`;
  const resumed = one.resumed ? `, resumed ${one.resumed}×` : "";
  if (one.status === 499) return html`<${State} level="off">client left${resumed}<//>`;
  if (isError(one)) return html`<${State} level="bad">${one.status} ${one.error ?? ""}${resumed}<//>`;
  if (one.status >= 400) return html`<${State} level="warn">${one.status} ${one.error ?? ""}<//>`;
  return html`<${State} level="ok">${one.status}${resumed}<//>`;
}

/** One request: measured and predicted parts. */
function One({ id, request, onClose }) {
  const [found, setFound] = useState({});
  const top = useRef(null);
  useEffect(() => { top.current.focus(); }, []);
  const state = request && !isRunning(request) ? "finished" : "running";
  useEffect(() => {
    let isOver = false;
    getPlan(id).then((plan) => !isOver && setFound({ plan }), (error) => !isOver && setFound({ error }));
    return () => { isOver = true; };
  }, [id, state]);
  return html`<${Card} title="Request" id="plan">
    <p class="buttons" ref=${top} tabindex="-1"><code id="plan-id">${id}</code> <button type="button" class="quiet" onClick=${onClose}>Close</button></p>
    ${request && html`<p>${stateOf(request)} ${request.path}, ${clock(request.at)}${request.tenant ? `, tenant ${request.tenant}` : ""}${request.tokens ? `, ${count(request.tokens)} tokens` : ""}</p>`}
    ${found.error && html`<${Alert}>${found.error.message}<//>`}
    ${found.plan ? html`<div id="plan-told"><${Plan} plan=${found.plan} request=${request} /></div>` : !found.error && html`<p class="soft" role="status">Asking for the plan ...</p>`}<//>`;
}
