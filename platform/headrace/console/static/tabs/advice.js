// Whether disaggregation of prefill and decode pays on the recent traffic.
import { html } from "../vendor/htm-preact.js";
import { count, number, percent, plural, seconds } from "../lib/format.js";
import { Card, DocsPage, Table } from "../widgets/layout.js";

const MIN_REQUESTS = 32; // headrace.disaggregation gives no advice on fewer

export function Advice({ status }) {
  const advice = Object.entries(status.advice_by_model ?? { "": status.advice });
  return html`<div class="grid">${advice.map(([name, one]) => html`<${Disaggregation} key=${name} name=${name} advice=${one} seen=${seenRequests(status, name)} />`)}</div>`;
}

const outcomesOf = (status, name = "") => status.replicas.filter((one) => !name || one.model === name).map((one) => one.router?.outcomes).filter(Boolean);
const seenRequests = (status, name) => outcomesOf(status, name).reduce((total, one) => total + (one.traffic?.requests ?? 0), 0);

function Disaggregation({ name, advice, seen }) {
  const title = name ? `Does disaggregation pay for ${name}?` : "Does disaggregation pay?";
  const id = name ? `advice-${name}` : "advice";
  const docs = html`<p class="soft"><${DocsPage} page="routing.md#in-hindsight">How this is computed<//></p>`;
  if (!advice) return html`<${Card} title=${title} id=${id} wide><p>Too little traffic yet: the advice needs ${MIN_REQUESTS} requests, and the replicas remember ${count(seen)}.</p>${docs}<//>`;
  const { best, now, colocated } = advice;
  const gain = best && best.request_s && colocated.request_s ? Math.abs(1 - best.request_s / colocated.request_s) : null;
  const row = (name, one) => ({ key: name, cells: [name, one.prefill, one.decode, one.ttft_s === null ? "overloaded" : seconds(one.ttft_s), seconds(one.token_s), seconds(one.request_s)] });
  return html`<${Card} title=${title} id=${id} wide>
    <p class="verdict">${advice.disaggregation_pays ? "Yes: disaggregation pays for this traffic." : "No: disaggregation does not pay for this traffic."}</p>
    <p>Disaggregation computes prompts on prefill replicas and moves their KV to decode replicas. With it, ${best
      ? html`the best split of these engines would take ${seconds(best.request_s)} for a mean request${best.request_s === null ? " (it is overloaded)" : ""}; without prefill replicas, it would be ${colocated.request_s === null ? "overloaded" : seconds(colocated.request_s)}${gain === null ? "" : ` (${percent(gain)} ${advice.disaggregation_pays ? "less" : "more"} with it)`}.`
      : "there would have to be more than one engine."}${" "}
      This is computed from the last ${plural(advice.requests, "request")} (${number(advice.rate)} a second).</p>
    <p>Disaggregated, this traffic needs ${plural(advice.prefill, "prefill replica")} and ${plural(advice.decode, "decode replica")}.</p>
    ${!advice.disaggregation_pays && now.prefill > 0 && html`<p>To stop prefill replicas that are not needed, set <code>prefill.autoscaling.min_replicas: 0</code>.</p>`}
    <${Table} label="Splits of the engines" columns=${[{ name: "Split of the engines" }, { name: "Prefill", right: true }, { name: "Decode", right: true }, { name: "First token", right: true }, { name: "Each token", right: true }, { name: "Mean request", right: true, minor: true }]}
      rows=${[row("as it is now", now), ...(best ? [row("best with prefill replicas", best)] : []), row("without prefill replicas", colocated)]} />${docs}<//>`;
}
