// Cards, tables, notes and bars: the shapes of which all tabs are made.
import { html } from "../vendor/htm-preact.js";

/** A titled section. `wide` spans all columns of the grid. */
export function Card({ title, id, wide, children, note }) {
  return html`<section class=${wide ? "card wide" : "card"} aria-labelledby=${`${id}-title`} id=${id}>
    <h2 id=${`${id}-title`}>${title}</h2>${note && html`<p class="soft">${note}</p>`}${children}</section>`;
}

/**
 * A table. `columns` are {name, right, minor, title}: numbers stand at the right, minor columns are hidden on a phone.
 * `rows` are {key, cells, selected}.
 */
export function Table({ label, columns, rows, none }) {
  if (!rows.length) return html`<p class="soft">${none}</p>`;
  const cls = (column) => [column.right && "right", column.minor && "minor"].filter(Boolean).join(" ");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table aria-label=${label}>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${cls(column)} title=${column.title}>${column.name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key} class=${row.selected ? "selected" : ""}>${row.cells.map((cell, at) =>
      (at ? html`<td class=${cls(columns[at])}>${cell}</td>` : html`<th scope="row" class=${cls(columns[at])}>${cell}</th>`))}</tr>`)}</tbody>
  </table></div>`;
}

/** A bar that shows a share of 1; the number stands beside it in the caller's text. */
export function Bar({ share, label }) {
  const used = Math.max(0, Math.min(1, share || 0));
  return html`<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="bar-all" width="100" height="8" /><rect class="bar-used" width=${100 * used} height="8" /></svg>`;
}

/** The state of a part: a mark, a colour and a word, so that no colour stands alone. */
export function State({ level, children }) {
  const mark = { ok: "●", warn: "▲", bad: "✕", off: "○", unknown: "…" }[level];
  return html`<span class="state ${level}"><span aria-hidden="true">${mark}</span> ${children}</span>`;
}

/** A problem that the reader should see at once. */
export const Alert = ({ children }) => html`<p role="alert" class="alert">${children}</p>`;

/** The name of a page in the documentation, which comes with the source. */
export const DocsPage = ({ page, children }) => html`<span class="docs">${children} (<code>docs/${page}</code>)</span>`;
