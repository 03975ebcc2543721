// The first tab: the picture of the app, and its load and speed over time.
import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { number, percent, replicaName, seconds, count } from "../lib/format.js";
import { ratesOf } from "../lib/history.js";
import { rayDashboard, replicaPage } from "../lib/links.js";
import { Chart } from "../widgets/chart.js";
import { Card, State, Table } from "../widgets/layout.js";
import { Topology } from "../widgets/topology.js";

const RANGES = [["10 min", 600, 0], ["1 h", 3600, 0], ["1 day", 86400, 1]]; // name, seconds, which series

export function Overview({ status, history, counters, theme }) {
  return html`<div class="grid">
    <${Card} title="Topology" id="topology" wide note="A bar is the part of a KV cache or of a tier that is in use. A moving line carries something now.">
      <${Topology} status=${status} history=${history.data} counters=${counters} /><//>
    <${Charts} history=${history} theme=${theme} />
    <${Replicas} status=${status} />
    <${Batches} batches=${status.gateway?.batches ?? []} /></div>`;
}

function Charts({ history, theme }) {
  const [chosen, setChosen] = useState(0);
  const [, range_s, at] = RANGES[chosen];
  const lines = useMemo(() => linesOf(history.data && ratesOf(history.data.series[at], history.data.now)), [history.data, at]);
  const now = history.data?.now ?? 0;
  const window = { times: lines.times, from_s: now - range_s, to_s: now, theme };
  const note = history.error && !history.data ? `The gateway's history is not known: ${history.error.message}` : "The gateway keeps these numbers since its start.";
  return html`<${Card} title="Traffic" id="traffic" wide note=${note}>
    <p class="ranges" role="group" aria-label="Time range">${RANGES.map(([name], n) => html`<button type="button" aria-pressed=${n === chosen} onClick=${() => setChosen(n)}>${name}</button>`)}</p>
    ${!history.data ? html`<p class="soft" role="status">${history.error ? "" : "Asking the gateway ..."}</p>` : html`<div class="charts">
      <div><h3>Requests</h3><${Chart} label="Requests a second" ...${window} lines=${lines.requests} format=${number} max=${1} /></div>
      <div><h3>Time to first token</h3><${Chart} label="Time to first token" ...${window} lines=${lines.ttft} format=${seconds} max=${0.05} /></div>
      <div><h3>Answer tokens</h3><${Chart} label="Answer tokens a second" ...${window} lines=${lines.tokens} format=${number} max=${1} /></div></div>`}<//>`;
}

/** The charts' lines. */
function linesOf(rates) {
  const line = (name, column) => ({ name, values: rates?.[column] ?? [] });
  return {
    times: rates?.at ?? [],
    requests: [line("requests/s", "requests"), line("errors/s", "errors")],
    ttft: [line("p50", "ttft_p50_s"), line("p99", "ttft_p99_s")],
    tokens: [line("tokens/s", "tokens")],
  };
}

/** What engines run without: each part and reason once, with the replicas. */
function leftOutOf(replicas) {
  const found = new Map();
  for (const one of replicas) {
    for (const [part, why] of Object.entries(one.left_out ?? {})) {
      const key = JSON.stringify([part, why]);
      if (!found.has(key)) found.set(key, { part: part.replaceAll("_", " "), why, names: [] });
      found.get(key).names.push(replicaName(one));
    }
  }
  return [...found.values()];
}

/** The unfinished batches; nothing if there are none. */
function Batches({ batches }) {
  if (!batches.length) return null;
  const done = (one) => one.completed + one.failed;
  return html`<${Card} title="Batches" id="batches" wide note="Unfinished batches. Their lines run when other requests leave room.">
    <${Table} label="Batches" none="" columns=${[{ name: "Batch" }, { name: "Tenant", minor: true }, { name: "Status" }, { name: "Lines done", right: true }, { name: "Failed", right: true }, { name: "In flight", right: true, minor: true }]}
      rows=${batches.map((one) => ({ key: one.id, cells: [html`<code title=${one.id}>${one.id.slice(0, 14)}</code>`, one.tenant ?? "-", one.status.replaceAll("_", " "),
        `${count(done(one))} of ${count(one.total)}${one.total ? ` (${percent(done(one) / one.total)})` : ""}`, count(one.failed), count(one.in_flight)] }))} /><//>`;
}

function Replicas({ status }) {
  const ray = rayDashboard(status.ray, location);
  const named = (one) => {
    const href = replicaPage(status.ray, location, one);
    return href ? html`<a href=${href}>${replicaName(one)}</a>` : replicaName(one);
  };
  const remote = (one) => {
    if (one.role !== "decode" || !one.router?.breaker) return "-";
    const { state, reason } = one.router.breaker;
    return state === "closed" ? html`<${State} level="ok">OK<//>` : html`<span title=${reason}><${State} level="warn">off<//></span>`;
  };
  return html`<${Card} title="Replicas" id="replicas" wide>
    <${Table} label="Replicas" none="No replica answers." columns=${[{ name: "Replica" }, { name: "Running", right: true }, { name: "Waiting", right: true }, { name: "KV cache in use", right: true },
        { name: "Prompt tokens computed", right: true, minor: true }, { name: "Prefill by prefill replicas", minor: true }]}
      rows=${status.replicas.map((one) => ({ key: one.replica_id, cells: [named(one), count(one.running), count(one.waiting), percent(one.kv_usage ?? 0), count(one.prompt_tokens_computed), remote(one)] }))} />
    ${leftOutOf(status.replicas).map(({ part, why, names }) => html`<p class="left-out" key=${part + why}><${State} level="warn">no ${part}<//> at ${names.join(", ")}: ${why}</p>`)}
    ${ray?.href && html`<p class="soft">A name leads to the replica and its logs in Ray's dashboard, which asks for Ray's token.</p>`}
    ${ray?.note && html`<p class="soft">Logs are in Ray's dashboard. ${ray.note}</p>`}<//>`;
}
