// A small line without axes: the shape of the last minutes.
import { html } from "../vendor/htm-preact.js";

const WIDTH = 120;
const HEIGHT = 28;

/** `values` may have null for times without a value; `label` says in words what is drawn. */
export function Sparkline({ values, label }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const empty = known.length < 2;
  const high = Math.max(...known, 1e-9);
  const place = (value, at) => `${((at * WIDTH) / (values.length - 1)).toFixed(1)},${(HEIGHT - 2 - (value / high) * (HEIGHT - 4)).toFixed(1)}`;
  const lines = [];
  let line = [];
  for (const [at, value] of values.entries()) {
    if (value === null || value === undefined) {
      if (line.length) lines.push(line);
      line = [];
    } else line.push(place(value, at));
  }
  if (line.length) lines.push(line);
  return html`<svg class="spark" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${empty
      ? html`<line class="spark-none" x1="0" x2=${WIDTH} y1=${HEIGHT - 2} y2=${HEIGHT - 2} />`
      : lines.map((points) => (points.length > 1 ? html`<polyline points=${points.join(" ")} />` : html`<circle cx=${points[0].split(",")[0]} cy=${points[0].split(",")[1]} r="1.5" />`))}
  </svg>`;
}
