// Who uses the app: the usage of the last day, recent requests by tenant, and the shares of the engines' time.
import { html } from "../vendor/htm-preact.js";
import { count, percent, plural, seconds } from "../lib/format.js";
import { queuesOf } from "../lib/models.js";
import { byTenant } from "../lib/tenants.js";
import { Alert, Bar, Card, DocsPage, Table } from "../widgets/layout.js";

export function Tenants({ status, requests, usage }) {
  return html`<div class="grid"><${Usage} usage=${usage} /><${Recent} requests=${requests} /><${Queue} status=${status} /></div>`;
}

function Usage({ usage }) {
  const { data, error } = usage;
  const lines = data?.usage ?? [];
  const reused = (one) => one.cached_tokens + one.dram_tokens + one.nvme_tokens + one.remote_tokens + one.blended_tokens;
  const share = (one) => (reused(one) + one.computed_tokens ? reused(one) / (reused(one) + one.computed_tokens) : null);
  return html`<${Card} title="Usage of the last day" id="usage" wide note="By all gateways, in whole hours, as it can be billed. Engine seconds are each request's share of the engines' steps.">
    ${!data && (error ? html`<p class="soft">${error.message}</p>` : html`<p class="soft" role="status">Asking the gateway ...</p>`)}
    ${data && html`<${Table} label="Usage of the last day" none="No usage yet."
      columns=${[{ name: "Tenant" }, { name: "Model", minor: true }, { name: "Answers", right: true, minor: true }, { name: "Prompt tokens", right: true }, { name: "Reused", right: true, title: "Share of the prompt tokens of all engines whose KV came from a cache or the store; KV from a prefill engine was computed there" },
        { name: "Answer tokens", right: true }, { name: "Engine time", right: true }]}
      rows=${lines.map((one) => ({ key: `${one.tenant} ${one.model}`, cells: [one.tenant || "(no key)", one.model, count(one.requests), count(one.prompt_tokens), percent(share(one)), count(one.output_tokens), seconds(one.engine_s)] }))} />`}
    <p class="soft"><code>headrace usage</code> has other times, all quantities and CSV. <${DocsPage} page="usage.md">Usage and billing<//></p><//>`;
}

function Recent({ requests }) {
  const { data, error } = requests;
  const rows = data ? byTenant(data.finished, data.in_flight) : [];
  const over = data?.finished.length ? `Over the last ${count(data.finished.length)} finished requests that this gateway remembers, the first ones after a start included.` : "";
  return html`<${Card} title="Recent requests by tenant" id="recent" wide note=${over}>
    ${!data && (error ? html`<${Alert}>The requests are not known: ${error.message}<//>` : html`<p class="soft" role="status">Asking the gateway ...</p>`)}
    ${data && html`<${Table} label="Recent requests by tenant" none="No request yet."
      columns=${[{ name: "Tenant" }, { name: "Requests", right: true }, { name: "In flight", right: true, minor: true }, { name: "Answer tokens", right: true }, { name: "Errors", right: true, title: "Status 500 and above, and broken streams" },
        { name: "Refused", right: true, minor: true, title: "Status 400 to 498" }, { name: "TTFT p50", right: true }, { name: "TTFT p99", right: true, minor: true }]}
      rows=${rows.map((one) => ({ key: one.tenant ?? "", cells: [one.tenant ?? "(no key)", count(one.requests), count(one.running), count(one.tokens), one.errors ? `${count(one.errors)} (${percent(one.errors / one.requests)})` : "0", count(one.refused), seconds(one.ttft_p50_s), seconds(one.ttft_p99_s)] }))} />`}
    ${rows.length === 1 && rows[0].tenant === null && html`<p class="soft">Requests without a key belong to no tenant. <${DocsPage} page="keys.md">Keys and tenants<//></p>`}<//>`;
}

function Queue({ status }) {
  const queues = queuesOf(status);
  if (!queues.length) return html`<${Card} title="Admission queue" id="queue" wide><p>Admission is off: every request is sent to a replica at once. <${DocsPage} page="admission.md">Admission<//></p><//>`;
  const used = Object.entries(status.engine_s_by_tenant ?? {}).sort(([, a], [, b]) => b - a);
  const all = used.reduce((total, [, s]) => total + s, 0);
  return html`<${Card} title="Admission queue" id="queue" wide>
    ${queues.map(([name, queue]) => html`<p key=${name}>${name && html`<b>${name}</b>: `}${plural(queue.waiting, "request")} of ${plural(queue.tenants_waiting, "tenant")} ${queue.waiting === 1 ? "waits" : "wait"} at this gateway, the last one for about ${seconds(queue.predicted_wait_s)}; ${count(queue.background_waiting)} in the background.
      Since its start it admitted ${count(queue.admitted)} requests, ${count(queue.waited)} of them after a wait, refused ${count(queue.refused)}, and gave up ${count(queue.expired)}.</p>`)}
    <${Table} label="Shares of the engines' time" none="No tenant has used the engines yet." columns=${[{ name: "Tenant" }, { name: "Engine time", right: true }, { name: "Share", right: true }, { name: "" }]}
      rows=${used.map(([tenant, s]) => ({ key: tenant, cells: [tenant || "(no key)", seconds(s), percent(s / all), html`<${Bar} share=${s / all} label=${`${tenant || "no key"}: ${percent(s / all)}`} />`] }))} />
    <p class="soft">Engine time is what the admission queue has charged a tenant for, over all gateways. The queue shares it fairly between tenants that wait.</p><//>`;
}
