// A chart over time, drawn by uPlot, with a legend in words. The value under the pointer takes the place of the last one.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { clock } from "../lib/format.js";

const HEIGHT = 180;
const DASHES = [[], [6, 4], [2, 3]];

/** Seconds between two time labels, so that these do not touch. */
const STEPS_S = [1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/**
 * `times` are Unix seconds and `lines` are {name, values}. The axis reaches from `from_s` to `to_s`. `format` makes the
 * text of a value; `max` is the least upper end of the y axis.
 */
export function Chart({ label, times, lines, from_s, to_s, format, max = 0, theme }) {
  const place = useRef(null);
  const chart = useRef(null);
  const [under, setUnder] = useState(null);
  const names = lines.map((line) => line.name).join();
  const range = useRef([from_s, to_s]);
  range.current = [from_s, to_s];
  useEffect(() => {
    const box = place.current;
    const colours = [...box.parentElement.querySelectorAll(".swatch")].map((each) => getComputedStyle(each).color);
    const ink = getComputedStyle(box).color;
    const axis = { stroke: ink, font: "12px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: "#8883", width: 1 } };
    const labelled = (long) => (_, splits) => splits.map((at) => clock(at).slice(0, long() ? 8 : 5));
    chart.current = new window.uPlot({
      width: Math.max(200, box.clientWidth), height: HEIGHT,
      legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { range: () => range.current }, y: { range: (_, low, high) => [0, Math.max(max, 1.1 * (high ?? 0), 1e-9)] } },
      axes: [
        { ...axis, size: 26, values: labelled(() => range.current[1] - range.current[0] <= 120), incrs: STEPS_S, space: 70 },
        { ...axis, size: 62, values: (_, splits) => splits.map((value) => (value === 0 ? "0" : format(value))) },
      ],
      series: [{}, ...lines.map((line, at) => ({ stroke: colours[at], width: 2, dash: DASHES[at], points: { size: 4, filter: lonely } }))],
      hooks: { setCursor: [(plot) => setUnder(plot.cursor.idx ?? null)] },
    }, [[], ...lines.map(() => [])], box);
    const watch = new ResizeObserver(() => chart.current?.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT }));
    watch.observe(box);
    return () => { watch.disconnect(); chart.current.destroy(); chart.current = null; };
  }, [names, theme, format, max]);
  useEffect(() => { chart.current?.setData([times, ...lines.map((line) => line.values)]); }, [times, lines, from_s, to_s, names, theme]);
  const at = under !== null && under < times.length ? under : times.length - 1;
  const shown = (line) => (at < 0 ? "-" : format(line.values[at]));
  return html`<figure class="chart" aria-label=${label}>
    <figcaption><span class="legend">${lines.map((line, n) => html`<span><span class="swatch line-${n + 1}"></span>${line.name} <b>${shown(line)}</b></span>`)}</span>
      <span class="soft">${at >= 0 && clock(times[at])}</span></figcaption>
    <div class="plot" ref=${place} aria-hidden="true"></div></figure>`;
}

/** Points between two gaps, which no line would show. */
function lonely(plot, series) {
  const values = plot.data[series];
  const isGap = (at) => values[at] === null || values[at] === undefined;
  return values.map((_, at) => at).filter((at) => !isGap(at) && isGap(at - 1) && isGap(at + 1));
}
