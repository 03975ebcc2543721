// Parts of a request one after the other, as bars on one time axis.
import { html } from "../vendor/htm-preact.js";
import { seconds } from "../lib/format.js";

/** `rows` are {name, parts: [{part, name, seconds, meaning}]}. A number, from `first` on, links a part's bar to the legend below it. */
export function Waterfall({ label, rows, first = 1 }) {
  const drawn = rows.filter((row) => row.parts.length);
  if (!drawn.length) return null;
  const end = Math.max(...drawn.map((row) => total(row.parts)), 1e-9);
  let next = first - 1;
  const numbered = drawn.map((row) => ({ ...row, parts: row.parts.map((part) => ({ ...part, number: (next += 1) })) }));
  return html`<div class="waterfall" role="group" aria-label=${label}>${numbered.map((row) => html`<div class="lane">
    <p><b>${row.name}: ${seconds(total(row.parts))}</b></p>
    <div class="track" aria-hidden="true">${row.parts.map((part) => html`<span class="part-${part.part}" title=${`${part.name} ${seconds(part.seconds)}`}
      style=${{ width: `${(100 * part.seconds) / end}%` }}>${part.seconds / end > 0.04 ? part.number : ""}</span>`)}</div>
    <ol class="parts">${row.parts.map((part) => html`<li title=${part.meaning}><span class="box part-${part.part}" aria-hidden="true">${part.number}</span>
      ${part.name} ${seconds(part.seconds)}</li>`)}</ol></div>`)}</div>`;
}

const total = (parts) => parts.reduce((sum, part) => sum + part.seconds, 0);
