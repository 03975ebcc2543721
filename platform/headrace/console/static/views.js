// The console's sections. Each takes the state as `GET /headrace/v1/console` tells it.
import { html, useEffect, useRef } from "/console/vendor/htm-preact.js";

const short = (one) => `${one.deployment ?? one.role}/${String(one.replica_id ?? "?").slice(0, 8)}`;
const percent = (part) => `${(100 * part).toFixed(0)} %`;
const seconds = (s) => (s === null || s === undefined ? "" : s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(2)} s`);
const bytes = (n) => {
  let at = 0;
  for (; n >= 1024 && at < 4; at += 1) n /= 1024;
  return `${n.toFixed(at ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
};

/** Ray's dashboard as this browser reaches it: through the same tunnel where the page came through one. */
function dashboardOf(state) {
  const told = state.ray?.dashboard;
  if (!told) return null;
  const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  return `http://${local ? `${location.hostname}:${told.split(":").at(-1)}` : told}/#/serve/applications/${state.ray.app}`;
}

function Table({ head, rows, label, none }) {
  if (!rows.length) return html`<p>${none}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table aria-label=${label}>
    <thead><tr>${head.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, at) => (at ? html`<td>${cell}</td>` : html`<th scope="row">${cell}</th>`))}</tr>`)}</tbody>
  </table></div>`;
}

/** Gateway, decode, prefill and store nodes in columns, and who talks to whom. */
export function Topology({ state }) {
  const of = (role) => state.replicas.filter((one) => one.role === role);
  const engine = (one) => ({
    name: short(one),
    told: `${one.running ?? 0} running, ${one.waiting ?? 0} waiting`,
    used: one.kv_usage ?? 0,
  });
  const columns = [
    ["Gateway", [{ name: `process ${state.gateway?.pid ?? ""}`, told: `${state.gateway?.relaying ?? 0} requests${state.gateway?.queue ? `, ${state.gateway.queue.waiting + state.gateway.queue.background_waiting} of them wait` : ""}`, used: 0 }]],
    ["Decode", of("decode").map(engine)],
    ["Prefill", of("prefill").map(engine)],
    ["KV store", (state.store ?? []).map((node) => ({
      name: `machine ${String(node.machine ?? "?").slice(0, 8)}`,
      told: node.tiers ? Object.keys(node.tiers).join(", ") : "no answer",
      used: node.tiers?.dram ? node.tiers.dram.bytes / Math.max(1, node.tiers.dram.size_bytes) : 0,
    }))],
  ];
  const high = 66, wide = 190, gap = 60;
  const rows = Math.max(1, ...columns.map(([, all]) => all.length));
  const at = (column, row) => [column * (wide + gap), 30 + row * (high + 14)];
  const lines = [];
  for (const [from, to] of [[0, 1], [1, 2], [2, 3]]) {
    columns[from][1].forEach((_, a) => columns[to][1].forEach((__, b) => {
      const [x, y] = at(from, a), [u, v] = at(to, b);
      lines.push(html`<line x1=${x + wide} y1=${y + high / 2} x2=${u} y2=${v + high / 2} />`);
    }));
  }
  const width = 4 * wide + 3 * gap, height = 30 + rows * (high + 14);
  return html`<section aria-labelledby="topology"><h2 id="topology">Topology</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Topology">
    <svg viewBox="0 0 ${width} ${height}" width=${width} height=${height} role="img" aria-label="Who talks to whom; the table of replicas has the same numbers">
      ${lines}
      ${columns.map(([title, all], column) => html`
        <text class="title" x=${at(column, 0)[0]} y="16">${title}</text>
        ${all.map((one, row) => {
          const [x, y] = at(column, row);
          return html`<rect class="box" x=${x} y=${y} width=${wide} height=${high} rx="6" />
            <rect class="used" x=${x} y=${y + high - 6} width=${wide * Math.min(1, one.used)} height="6" />
            <text x=${x + 10} y=${y + 24}>${one.name}</text><text x=${x + 10} y=${y + 46}>${one.told}</text>`;
        })}`)}
    </svg></div>
    <p>A bar is the part of the KV cache, or of the store's DRAM, that is in use.</p></section>`;
}

/** Requests of each role over the last ten minutes. */
export function Load({ points }) {
  const place = useRef(null);
  const chart = useRef(null);
  useEffect(() => {
    const ink = getComputedStyle(document.body).color;
    const line = (label, stroke, dash) => ({ label, stroke, width: 2, dash });
    const axis = { stroke: ink, grid: { stroke: "#8884", width: 1 } };
    chart.current = new window.uPlot({
      width: Math.min(900, place.current.clientWidth || 900), height: 220,
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high)] } },
      axes: [axis, axis],
      series: [{},
        line("decode running", "#2563eb"), line("decode waiting", "#2563eb", [4, 4]),
        line("prefill running", "#b45309"), line("prefill waiting", "#b45309", [4, 4])],
    }, [[], [], [], [], []], place.current);
    return () => chart.current.destroy();
  }, []);
  useEffect(() => {
    chart.current?.setData([0, 1, 2, 3, 4].map((at) => points.map((point) => point[at])));
  }, [points]);
  return html`<section aria-labelledby="load"><h2 id="load">Load by role</h2><div ref=${place} class="chart"></div></section>`;
}

/** Whether disaggregation pays, and how many replicas of each role it takes. */
export function Advice({ state }) {
  const told = state.advice;
  if (!told) return html`<section aria-labelledby="advice"><h2 id="advice">Advice</h2><p>Too little traffic yet.</p></section>`;
  const row = (name, one) => [name, one.prefill, one.decode, seconds(one.ttft_s) || "overloaded", seconds(one.token_s)];
  const rows = [row("as it is", told.now), row("no prefill replica", told.colocated)];
  if (told.best) rows.splice(1, 0, row("best with prefill replicas", told.best));
  return html`<section aria-labelledby="advice"><h2 id="advice">Advice</h2>
    <p>${told.disaggregation_pays ? "Disaggregation pays" : "Disaggregation does not pay"} on the last ${told.requests} requests
      (${told.rate.toFixed(2)} a second). Disaggregated, this traffic takes ${told.prefill} prefill and ${told.decode} decode replicas.
      ${!told.disaggregation_pays && told.now.prefill > 0 && html`<code>prefill.autoscaling.min_replicas: 0</code> stops prefill replicas that are not needed.`}</p>
    <${Table} label="Splits of the replicas" head=${["Split", "Prefill", "Decode", "First token", "Each token"]}
      rows=${rows} /></section>`;
}

/** One row a replica; its name leads to its logs in Ray's dashboard. */
export function Replicas({ state }) {
  const ray = dashboardOf(state);
  const named = (one) => (ray ? html`<a href="${ray}/${one.deployment}/${one.replica_id}">${short(one)}</a>` : short(one));
  const rows = state.replicas.map((one) => [
    named(one), one.running ?? "", one.waiting ?? "", percent(one.kv_usage ?? 0),
    (one.prompt_tokens_computed ?? 0).toLocaleString(), one.nixl ? bytes(one.nixl.bytes) : "",
    one.router?.breaker ? one.router.breaker.state : "",
  ]);
  return html`<section aria-labelledby="replicas"><h2 id="replicas">Replicas</h2>
    ${ray && html`<p>Names lead to the replica and its logs in <a href=${ray}>Ray's dashboard</a>, which asks for Ray's token.</p>`}
    <${Table} label="Replicas" none="No replica answers." rows=${rows}
      head=${["Replica", "Running", "Waiting", "KV used", "Prompt tokens computed", "Pulled over NIXL", "Remote prefill"]} /></section>`;
}

/** The store's tiers, and hits reached against reachable. */
export function Tiers({ state }) {
  const count = (tier, name) => (tier.state === "off" ? "-" : (tier[name] ?? 0).toLocaleString());
  const rows = (state.store ?? []).flatMap((node) => Object.entries(node.tiers ?? {}).map(([name, tier]) => [
    `${String(node.machine ?? "?").slice(0, 8)} ${name}`, tier.state ?? "", count(tier, "blocks"),
    bytes(tier.bytes ?? 0), bytes(tier.size_bytes ?? 0), count(tier, "hits"), count(tier, "misses"),
  ]));
  const told = state.replicas.map((one) => one.router?.outcomes).filter(Boolean);
  const sum = (name) => told.reduce((total, one) => total + one[name], 0);
  const all = Math.max(1, sum("prompt_tokens"));
  return html`<section aria-labelledby="tiers"><h2 id="tiers">KV tiers</h2>
    <p>Of all prompt tokens, ${percent(sum("reachable_tokens") / all)} were held somewhere when they were planned, and ${percent(sum("reached_tokens") / all)}${" "}
      were not computed. Regret: ${percent(sum("regret_s") / Math.max(1e-9, sum("cost_s")))} of what the plans cost.</p>
    <${Table} label="KV tiers" none="No KV store runs." rows=${rows} head=${["Tier", "State", "Blocks", "Used", "Size", "Hits", "Misses"]} /></section>`;
}

/** Requests in flight at this gateway, the oldest first. */
export function Requests({ state, onPlan }) {
  const rows = (state.gateway?.requests ?? []).map((one) => [
    html`<button type="button" onClick=${() => onPlan(one.id)}>${one.id}</button>`, one.path, seconds(one.age_s),
    one.ttft_s === null ? "waits for its first token" : `first token after ${seconds(one.ttft_s)}`, bytes(one.sent_bytes), one.replica.slice(0, 8),
  ]);
  return html`<section aria-labelledby="requests"><h2 id="requests">Requests in flight, the oldest first</h2>
    <${Table} label="Requests in flight" none="None." rows=${rows} head=${["Plan", "Route", "Age", "State", "Sent", "Replica"]} /></section>`;
}

/** One request's plan, by its id. */
export function Plan({ plan, onPlan }) {
  const field = useRef(null);
  const look = (event) => { event.preventDefault(); onPlan(field.current.value.trim()); };
  const told = plan.told;
  const parts = told ? [...new Set(Object.keys(told.predicted).map((name) => name.split(".")[1]))] : [];
  const of = (kind, part) => seconds(told.predicted[`${kind}.${part}`]);
  return html`<section aria-labelledby="plan"><h2 id="plan">Plan of a request</h2>
    <form onSubmit=${look}><label for="request">Request id</label>
      <input id="request" ref=${field} required placeholder="x-request-id of its answer" /><button type="submit">Explain</button></form>
    ${plan.error && html`<p role="alert">${plan.error}</p>`}
    ${told && html`<div id="plan-told"><p>${told.request_id}: ${told.kind}, answered by ${told.decode}${told.prefill ? `, prefilled by ${told.replica || told.prefill}` : ""}:${" "}
        ${told.runs.map((run) => `${run.tokens} tokens ${run.source}`).join(", ")}.</p>
      <p>Planned by a ${told.made_by}, because ${told.reasons[0]}.
        ${told.measured ? ` First token after ${seconds(told.measured.ttft_s)}, regret ${seconds(told.measured.regret_s)}.` : ""}</p>
      <${Table} label="Predicted seconds" head=${["Part", "local", "remote"]} rows=${parts.map((part) => [part, of("local", part), of("remote", part)])} />
      <${Table} label="Next best choices" none="There was no other choice." head=${["Decode", "Prefill", "Total"]}
        rows=${told.runners_up.map((other) => [other.decode, other.prefill || "there", seconds(other.total_s)])} /></div>`}</section>`;
}

/** Speculative decoding in each decode replica. */
export function SpeculativeDecoding({ state }) {
  const rows = state.replicas.filter((one) => one.speculation).map((one) => {
    const steps = (one.speculation.prices ?? {}).step_s ?? [];
    return [short(one), one.speculation.mode ?? "", steps.slice(0, 9).map(seconds).join(", ")];
  });
  return html`<section aria-labelledby="speculation"><h2 id="speculation">Speculative decoding</h2>
    <${Table} label="Speculative decoding" none="It is off in all replicas." rows=${rows} head=${["Replica", "Mode", "A step with 0, 1, 2 ... draft tokens"]} /></section>`;
}

/** The models that routers have fitted. */
export function Fits({ state }) {
  const number = (value) => (typeof value === "number" ? Number(value.toPrecision(4)) : value);
  const rows = state.replicas.filter((one) => one.router?.fits).flatMap((one) => Object.entries(one.router.fits).map(([name, terms]) => [
    `${short(one)} ${name}`, Object.entries(terms).map(([term, value]) => `${term} ${number(value)}`).join(", "),
  ]));
  return html`<section aria-labelledby="fits"><h2 id="fits">Fitted costs</h2>
    <${Table} label="Fitted costs" none="Nothing is fitted yet." rows=${rows} head=${["Model", "Terms"]} /></section>`;
}

/** Changes of settings. Without an administrator's key they are refused, and the refusal is shown. */
export function Actions({ done, order }) {
  const policy = (name) => html`<button type="button" onClick=${() => order("/headrace/v1/router", { policy: name })}>${name}</button>`;
  const speculation = (mode) => html`<button type="button" onClick=${() => order("/headrace/v1/speculation", { mode })}>${mode}</button>`;
  return html`<section aria-labelledby="actions"><h2 id="actions">Actions</h2>
    <p>Plans by policy: ${["cost", "local", "remote"].map(policy)}</p>
    <p>Speculative decoding: ${["auto", "off"].map(speculation)}</p>
    <p role="status" id="done">${done}</p></section>`;
}
