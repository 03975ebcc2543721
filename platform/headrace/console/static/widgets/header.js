// The page's head: what runs, whether it is healthy, and six figures of the last minute.
import { html } from "../vendor/htm-preact.js";
import { clock, number, percent, seconds } from "../lib/format.js";
import { ratesOf } from "../lib/history.js";
import { hitRates } from "../lib/counters.js";
import { Sparkline } from "./sparkline.js";
import { State } from "./layout.js";

const POINTS = 60; // of ten seconds each: ten minutes

/** `isLocked`: the gateway asks for a key, so there are no figures. */
export function Header({ model, health, isLocked, updated_s, history, counters, theme, onTheme }) {
  const lines = history ? ratesOf(history.series[0], history.now) : {};
  const tail = (name) => (lines[name] ?? []).slice(-POINTS);
  const last = history?.last ?? {};
  const rates = hitRates(counters);
  const errorShares = tail("errors").map((errors, at) => (tail("requests")[at] ? errors / tail("requests")[at] : null));
  const figures = [
    ["requests", "Requests/s", number(last.requests_per_s), "", tail("requests")],
    ["ttft", "TTFT p50, p99", seconds(last.ttft_p50_s), last.ttft_p99_s ? seconds(last.ttft_p99_s) : "", tail("ttft_p99_s"), "Time to first token: half of the requests, and 99 % of them, waited no longer"],
    ["tpot", "TPOT p99", seconds(last.tpot_p99_s), "", tail("tpot_p99_s"), "Time per output token after the first, of the slowest 1 % of requests"],
    ["tokens", "Tokens/s", number(last.tokens_per_s), "", tail("tokens")],
    ["hits", "KV hit rate", percent(rates.findLast((rate) => rate !== null) ?? null), "", rates.slice(-300), "Prompt tokens that were not computed, over ten seconds, since the page was opened"],
    ["errors", "Errors", percent(last.error_rate), "", errorShares, "Share of requests that the app failed to answer (status 500 and above, or a broken stream)"],
  ];
  return html`<header class="top">
    <div class="who"><h1>Headrace <small>${model}</small></h1>
      <p id="health" role="status" class="health ${health.level}"><${State} level=${health.level}>${health.text}<//></p>
      <p class="soft aside"><span id="updated">${updated_s ? `Updated ${clock(updated_s)}` : ""}</span>
        <button type="button" class="quiet" id="theme" onClick=${onTheme} title="Colours: as the system, light, dark">Colours: ${theme}</button></p></div>
    ${health.problems.length > 1 && html`<details class="problems"><summary>All problems</summary><ul>${health.problems.map((problem) => html`<li>${problem}</li>`)}</ul></details>`}
    ${!isLocked && html`<dl class="figures">${figures.map(([id, name, value, more, line, meaning]) => html`<div class="figure" id="figure-${id}" title=${meaning}>
      <dt>${name}</dt><dd><b>${value}</b>${more && html` <span class="more">${more}</span>`}</dd>
      <dd><${Sparkline} values=${line} label=${`${name}, last ten minutes`} /></dd></div>`)}</dl>
      <p class="soft window">Figures: the last minute; KV hit rate: the last ten seconds, since this page was opened. Lines: ten minutes.</p>`}
  </header>`;
}
