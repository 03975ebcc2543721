// Where KV is kept: the engines' caches, the tiers of each machine, other machines, and how much of it is used again.
import { html } from "../vendor/htm-preact.js";
import { hitRates, rateOf } from "../lib/counters.js";
import { bytes, count, number, percent, replicaName, shortId } from "../lib/format.js";
import { Chart } from "../widgets/chart.js";
import { Bar, Card, DocsPage, State, Table } from "../widgets/layout.js";

const TITLES = { dram: "DRAM", nvme: "NVMe", object: "Object store" };

export function Kv({ status, counters, theme }) {
  const nodes = status.store ?? [];
  return html`<div class="grid">
    <${HitRate} counters=${counters} theme=${theme} />
    <${Caches} status=${status} />
    ${nodes.length ? nodes.map((node) => html`<${Machine} node=${node} counters=${counters} alone=${nodes.length === 1} />`) : html`<${Card} title="KV store" id="store"><p>No KV store runs. The setting <code>store.enabled</code> starts one.</p><p><${DocsPage} page="kvstore.md">The KV store<//></p><//>`}</div>`;
}

function HitRate({ counters, theme }) {
  const last = counters.at(-1);
  const all = last?.promptTokens ?? 0;
  const lines = [{ name: "not computed", values: hitRates(counters) }];
  const times = counters.map((point) => point.at);
  const to_s = times.at(-1) ?? 0;
  return html`<${Card} title="KV hit rate" id="hits" wide note="The share of prompt tokens whose KV was taken from an engine's own cache or from the store, over ten seconds, since this page was opened. An engine looks into its own cache first, and a hit there is none of the store's.">
    ${all ? html`<p>Since the start of the replicas, ${percent(last.reachableTokens / all)} of all prompt tokens were held somewhere when they were planned, and ${percent(last.reachedTokens / all)} were not computed.</p>`
      : html`<p class="soft">No prompt yet.</p>`}
    <${Chart} label="KV hit rate" times=${times} lines=${lines} from_s=${Math.min(to_s - 60, times[0] ?? 0)} to_s=${to_s} format=${percent} max=${1} theme=${theme} /><//>`;
}

function Caches({ status }) {
  return html`<${Card} title="KV caches of the engines" id="caches" wide>
    <${Table} label="KV caches of the engines" none="No replica answers." columns=${[{ name: "Replica" }, { name: "In use", right: true }, { name: "" }]}
      rows=${status.replicas.map((one) => ({ key: one.replica_id, cells: [replicaName(one), percent(one.kv_usage ?? 0), html`<${Bar} share=${one.kv_usage} label=${`${replicaName(one)}: ${percent(one.kv_usage ?? 0)} in use`} />`] }))} /><//>`;
}

function Machine({ node, counters, alone }) {
  const name = shortId(node.machine);
  const title = `KV store of machine ${name}`;
  if (!node.tiers) return html`<${Card} title=${title} id=${`store-${name}`}><p><${State} level="bad">The store does not answer${node.down ? `: ${node.down}` : ""}.<//></p><//>`;
  const rows = Object.entries(node.tiers).map(([tier, told]) => ({ key: tier, cells: told.state === "off"
    ? [TITLES[tier] ?? tier, html`<span title=${told.reason}><${State} level="off">off<//></span>`, "-", "-", "-", "-", "-"]
    : [TITLES[tier] ?? tier, html`<${State} level=${told.state === "on" ? "ok" : "warn"}>${told.state}<//>`, html`<${InUse} tier=${told} title=${TITLES[tier] ?? tier} />`,
      count(told.blocks ?? 0), count(told.hits ?? 0), count(told.misses ?? 0), percent(told.hits + told.misses ? told.hits / (told.hits + told.misses) : null)] }));
  const off = Object.entries(node.tiers).filter(([, told]) => told.state !== "on" && told.reason);
  const perSecond = (tier) => number(rateOf(counters, (point) => point.tiers[tier]?.hits ?? 0));
  return html`<${Card} title=${title} id=${`store-${name}`} wide>
    <${Table} label=${`Tiers of machine ${name}`} columns=${[{ name: "Tier" }, { name: "State" }, { name: "In use" }, { name: "Blocks", right: true, minor: true },
      { name: "Hits", right: true }, { name: "Misses", right: true }, { name: "Hit rate", right: true, minor: true }]} rows=${rows} />
    ${off.map(([tier, told]) => html`<p class="soft">${TITLES[tier] ?? tier} is ${told.state}: ${told.reason}</p>`)}
    ${alone && counters.length > 1 && html`<p class="soft">Hits now: ${Object.keys(node.tiers).filter((tier) => node.tiers[tier].state !== "off").map((tier) => `${TITLES[tier] ?? tier} ${perSecond(tier)}/s`).join(", ")}.</p>`}
    <${Peers} remote=${node.remote ?? {}} name=${name} /><//>`;
}

function InUse({ tier, title }) {
  const used = tier.bytes ?? 0;
  if (!tier.size_bytes) return bytes(used);
  return html`${bytes(used)} of ${bytes(tier.size_bytes)}<${Bar} share=${used / tier.size_bytes} label=${`${title}: ${percent(used / tier.size_bytes)} in use`} />`;
}

function Peers({ remote, name }) {
  const peers = Object.entries(remote.peers ?? {});
  if (!peers.length) return html`<p class="soft">${remote.address ? `No other machine's store is known. This one listens at ${remote.address}.` : `Other machines' stores are not used${remote.reason ? `: ${remote.reason}` : ""}.`}</p>`;
  return html`<h3>Other machines, as this one sees them</h3><${Table} label=${`Peers of machine ${name}`} columns=${[{ name: "Address" }, { name: "State" }, { name: "Blocks in DRAM", right: true }, { name: "Blocks on NVMe", right: true }]}
    rows=${peers.map(([address, peer]) => ({ key: address, cells: [address, html`<span title=${peer.reason}><${State} level=${peer.state === "up" ? "ok" : "warn"}>${peer.state}<//></span>`, count(peer.blocks?.DRAM), count(peer.blocks?.NVME)] }))} />`;
}
