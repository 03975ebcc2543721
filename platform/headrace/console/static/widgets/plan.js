// One request's plan: its reasons in words, the waterfall, and the price of both choices by part.
import { html } from "../vendor/htm-preact.js";
import { seconds } from "../lib/format.js";
import { measuredParts, planSentences, predictedParts, priceRows } from "../lib/plans.js";
import { DocsPage, Table } from "./layout.js";
import { Waterfall } from "./waterfall.js";

/** `request` is the row of /headrace/v1/requests, or null if the gateway does not remember it. */
export function Plan({ plan, request }) {
  const measured = measuredParts(request, plan);
  const untilFirst = measured.some(({ part }) => part === "first") ? measured.filter(({ part }) => part !== "rest") : [];
  const rows = priceRows(plan);
  const chosen = (kind) => `${kind === "local" ? "Prefill on the decode replica" : "Prefill on a prefill replica"}${plan.kind === kind ? " (chosen)" : ""}`;
  const total = (kind) => seconds(plan.predicted[`${kind}.total`]);
  return html`<div class="plan">
    ${planSentences(plan).map((sentence) => html`<p>${sentence}</p>`)}
    <${Waterfall} label="The whole request" rows=${request ? [{ name: "Whole request, measured", parts: measured }] : []} />
    <${Waterfall} label="Until the first token" first=${request ? measured.length + 1 : 1} rows=${[{ name: "Until the first token, measured", parts: untilFirst }, { name: "Until the first token, predicted", parts: predictedParts(plan) }]} />
    <${Table} label="Predicted price by part" none="The plan has no prices." columns=${[{ name: "Predicted part" }, { name: chosen("local"), right: true }, { name: chosen("remote"), right: true }]}
      rows=${[...rows.map((row) => ({ key: row.part, cells: [html`<abbr title=${row.meaning}>${row.name}</abbr>`, seconds(row.local), seconds(row.remote)] })),
        { key: "total", cells: [html`<b>Total</b>`, html`<b>${total("local")}</b>`, html`<b>${total("remote")}</b>`] }]} />
    <details><summary>What the parts mean</summary><dl class="meanings">${rows.map((row) => html`<dt>${row.name}</dt><dd>${row.meaning}</dd>`)}</dl>
      <p class="soft">The total is the request's own wait plus the delay of other requests, in seconds. <${DocsPage} page="architecture.md#the-plan">How the router predicts<//></p></details>
  </div>`;
}
