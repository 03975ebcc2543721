// The live picture of the app: who sends what to whom, and how much of it now.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { rateOf } from "../lib/counters.js";
import { stateOf } from "../lib/health.js";
import { queuesOf } from "../lib/models.js";
import { bytes, number, percent, plural, replicaName, seconds, shortId } from "../lib/format.js";
import { replicaPage } from "../lib/links.js";

const MAX_SHOWN = 4; // boxes of a group; the rest is a line
const BOX = 46;
const HEAD = 30;
const NARROW_PX = 720;
const TIERS = [["dram", "DRAM"], ["nvme", "NVMe"], ["object", "Object store"], ["remote", "Other machines"]];

export function Topology({ status, history, counters }) {
  const place = useRef(null);
  const [isNarrow, setNarrow] = useState(false);
  useEffect(() => {
    const watch = new ResizeObserver(([box]) => setNarrow(box.contentRect.width < NARROW_PX));
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  const groups = groupsOf(status);
  const edges = edgesOf(status, history?.last, counters);
  const { width, height, places } = (isNarrow ? tall : wide)(groups);
  const lanes = (isNarrow ? tallLanes : wideLanes)(places);
  return html`<div class="topology" ref=${place}>
    <svg viewBox="0 0 ${width} ${height}" role="group" aria-label=${`Topology. ${Object.values(edges).map((edge) => edge.words).join(". ")}.`}>
      <defs>${["still", "flows"].map((id) => html`<marker id=${`arrow-${id}`} viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10" markerHeight="10" markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" /></marker>`)}</defs>
      ${Object.entries(lanes).map(([id, lane]) => html`<${Edge} edge=${edges[id]} lane=${lane} />`)}
      ${Object.entries(groups).map(([id, group]) => html`<${Group} group=${group} at=${places[id]} />`)}
    </svg></div>`;
}

function Edge({ edge, lane }) {
  const [x, y, anchor] = lane.label;
  const arrow = edge.flows && !edge.isOff ? "url(#arrow-flows)" : "url(#arrow-still)";
  return html`<g class=${`edge ${edge.isOff ? "off" : edge.flows ? "flows" : ""}`}>
    <path d=${lane.path} marker-end=${arrow} marker-start=${edge.isTwoWay ? arrow : undefined} />
    ${edge.lines.map((line, at) => html`<text x=${x} y=${y + 15 * at} text-anchor=${anchor ?? "middle"}>${line}</text>`)}</g>`;
}

function Group({ group, at }) {
  return html`<g class=${`group${group.isOff ? " off" : ""}`}>
    <rect class="frame" x=${at.x} y=${at.y} width=${at.w} height=${at.h} rx="8" />
    <text class="title" x=${at.x + 10} y=${at.y + 20}>${group.title}</text>
    ${group.boxes.map((box, n) => {
      const y = at.y + HEAD + n * BOX;
      const name = html`<text class="name" x=${at.x + 18} y=${y + 17}>${box.name}</text>`;
      return html`<g class=${box.isOff ? "off" : ""}><title>${box.title ?? `${box.name}: ${box.told}`}</title>
        <rect class="box" x=${at.x + 8} y=${y} width=${at.w - 16} height=${BOX - 6} rx="5" />
        ${box.share !== undefined && html`<rect class="used" x=${at.x + 8} y=${y + BOX - 10} width=${(at.w - 16) * Math.max(0, Math.min(1, box.share))} height="4" />`}
        ${box.href ? html`<a href=${box.href} aria-label=${`${box.name} in Ray's dashboard`}>${name}</a>` : name}
        <text class="told" x=${at.x + 18} y=${y + 32}>${box.told}</text></g>`;
    })}
    ${group.more && html`<text class="told" x=${at.x + 18} y=${at.y + HEAD + group.boxes.length * BOX + 12}>${group.more}</text>`}</g>`;
}

/** What stands in the picture: {id: {title, boxes: [{name, told, share, isOff, href}], more, isOff}}. */
function groupsOf(status) {
  const engines = (role) => {
    const all = status.replicas.filter((one) => one.role === role);
    const missing = status.health?.missing[role] ?? 0;
    return {
      boxes: all.slice(0, MAX_SHOWN).map((one) => ({
        name: replicaName(one), share: one.kv_usage ?? 0, href: replicaPage(status.ray, location, one),
        told: `${stateOf(status, one) ? `▲ ${stateOf(status, one)}, ` : ""}${one.running ?? 0} running, ${one.waiting ?? 0} waiting`,
        title: `${replicaName(one)}: ${percent(one.kv_usage ?? 0)} of its KV cache is in use`,
      })),
      more: [all.length > MAX_SHOWN ? `and ${all.length - MAX_SHOWN} more` : "", missing ? `✕ ${missing} ${missing === 1 ? "does" : "do"} not answer` : ""].filter(Boolean).join(", "),
      isOff: !all.length,
      n: all.length,
    };
  };
  const gateway = status.gateway ?? {};
  const queues = queuesOf(status);
  const waiting = queues.length ? queues.reduce((total, [, queue]) => total + queue.waiting + queue.background_waiting, 0) : null;
  const prefill = engines("prefill");
  const decode = engines("decode");
  return {
    client: { title: "Clients", boxes: [{ name: "OpenAI API", told: `${plural(gateway.relaying ?? 0, "request")} open` }] },
    gateway: { title: "Gateway", boxes: [{ name: `process ${gateway.pid ?? "?"}`, told: waiting === null ? "no admission queue" : `${waiting} in the queue` }] },
    decode: { ...decode, title: `Decode (${decode.n})`, more: decode.n ? decode.more : "no replica answers" },
    prefill: { ...prefill, title: `Prefill (${prefill.n})`, more: prefill.n ? prefill.more : "no replica" },
    store: storeOf(status.store ?? []),
  };
}

function storeOf(nodes) {
  const answering = nodes.filter((node) => node.tiers);
  const boxes = TIERS.map(([name, title]) => (name === "remote" ? peersBox(title, answering) : tierBox(title, answering.map((node) => node.tiers[name]).filter(Boolean))));
  const machines = nodes.length === answering.length ? plural(nodes.length, "machine") : `${answering.length} of ${nodes.length} machines`;
  return { title: nodes.length ? "KV store" : "KV store (off)", boxes, more: nodes.length ? `on ${machines}` : "", isOff: !answering.length };
}

function tierBox(title, tiers) {
  const on = tiers.filter((tier) => tier.state !== "off");
  const sum = (name) => on.reduce((total, tier) => total + (tier[name] ?? 0), 0);
  if (!on.length) return { name: title, told: "off", isOff: true, title: `${title}: off ${tiers[0]?.reason ?? ""}` };
  const size = sum("size_bytes");
  return { name: title, told: size ? `${bytes(sum("bytes"))} of ${bytes(size)}` : bytes(sum("bytes")), share: size ? sum("bytes") / size : undefined };
}

function peersBox(title, nodes) {
  const peers = nodes.flatMap((node) => Object.values(node.remote?.peers ?? {}));
  if (!peers.length) return { name: title, told: "none", isOff: true };
  return { name: title, told: `${peers.filter((peer) => peer.state === "up").length} of ${peers.length} links up` };
}

/** What flows: {id: {lines, words, flows, isTwoWay, isOff}}. */
function edgesOf(status, last, counters) {
  const busy = status.replicas.some((one) => one.running);
  const flow = (perSecond, format) => (perSecond === null ? "" : `${format(perSecond)}/s`);
  const nixl = rateOf(counters, (point) => point.nixlBytes);
  const fromStore = (role) => rateOf(counters, (point) => point.loadBytes[role]);
  const toStore = (role) => rateOf(counters, (point) => point.savedBlocks[role]);
  const has = (role) => status.replicas.some((one) => one.role === role);
  const hasStore = (status.store ?? []).some((node) => node.tiers);
  const store = (role, title) => {
    const [load, save] = [fromStore(role), toStore(role)];
    return {
      lines: hasStore && has(role) ? [load ? `loads ${flow(load, bytes)}` : "", save ? `saves ${number(save)} blocks/s` : ""].filter(Boolean) : [],
      words: `${title} and the KV store: loads ${flow(load, bytes) || "not known"}, saves ${save === null ? "not known" : `${number(save)} blocks/s`}`,
      flows: load > 0 || save > 0, isTwoWay: true, isOff: !hasStore || !has(role),
    };
  };
  const requests = last?.requests_per_s ?? null;
  const tokens = last?.tokens_per_s ?? null;
  return {
    client: { lines: requests === null ? [] : [`${number(requests)} requests/s`, ...(last.ttft_p50_s ? [`TTFT ${seconds(last.ttft_p50_s)}`] : [])], words: `Clients to the gateway: ${number(requests)} requests a second`, flows: requests > 0 || busy, isTwoWay: true },
    decode: { lines: tokens === null ? [] : [`${number(tokens)} tokens/s`], words: `Decode replicas to the gateway: ${number(tokens)} tokens a second`, flows: tokens > 0 || busy, isTwoWay: true, isOff: !has("decode") },
    nixl: { lines: ["KV over NIXL", nixl === null ? "" : `${bytes(nixl)}/s`].filter(Boolean), words: `Prefill to decode over NIXL: ${flow(nixl, bytes) || "not known"}`, flows: nixl > 0, isOff: !has("prefill") || !has("decode") },
    decodeStore: store("decode", "Decode"),
    prefillStore: store("prefill", "Prefill"),
  };
}

const heightOf = (group) => HEAD + group.boxes.length * BOX + (group.more ? 22 : 4);

/** Places for a wide screen: clients, gateway, engines above each other, store. */
function wide(groups) {
  const gap = 70;
  const [decode, prefill, store] = [heightOf(groups.decode), heightOf(groups.prefill), heightOf(groups.store)];
  const height = Math.max(decode + gap + prefill, store) + 4;
  const middle = 2 + decode / 2;
  const small = heightOf(groups.client);
  const top = Math.max(2, middle - small / 2);
  return {
    width: 1080, height,
    places: {
      client: { x: 2, y: top, w: 150, h: small },
      gateway: { x: 274, y: top, w: 160, h: small },
      decode: { x: 554, y: 2, w: 196, h: decode },
      prefill: { x: 554, y: 2 + decode + gap, w: 196, h: prefill },
      store: { x: 898, y: Math.max(2, (height - store) / 2), w: 180, h: store },
    },
  };
}

function wideLanes({ client, gateway, decode, prefill, store }) {
  const across = (from, to, y) => ({ path: `M${from.x + from.w + 2} ${y}H${to.x - 3}`, label: [(from.x + from.w + to.x) / 2, y - 22] });
  const y = client.y + client.h / 2 + 6;
  const x = decode.x + decode.w / 2;
  const toStore = (from) => {
    const at = from.y + from.h / 2;
    const to = Math.min(Math.max(at, store.y + 20), store.y + store.h - 20);
    const [start, end] = [from.x + from.w + 2, store.x - 3];
    return { path: `M${start} ${at}C${start + 60} ${at} ${end - 60} ${to} ${end} ${to}`, label: [(start + end) / 2, (at + to) / 2 - 22] };
  };
  return {
    client: across(client, gateway, y),
    decode: across(gateway, decode, y),
    nixl: { path: `M${x} ${prefill.y - 2}V${decode.y + decode.h + 3}`, label: [x + 12, (prefill.y + decode.y + decode.h) / 2 - 2, "start"] },
    decodeStore: toStore(decode),
    prefillStore: toStore(prefill),
  };
}

/** Places for a phone: one below the other, with a lane at the right for the way past the engines. */
function tall(groups) {
  const gap = 58;
  let y = 2;
  const places = {};
  for (const id of ["client", "gateway", "decode", "prefill", "store"]) {
    places[id] = { x: 2, y, w: 222, h: heightOf(groups[id]) };
    y += places[id].h + gap;
  }
  return { width: 366, height: y - gap + 2, places };
}

function tallLanes({ client, gateway, decode, prefill, store }) {
  const down = (from, to, isUp) => {
    const [top, bottom] = [from.y + from.h + 3, to.y - 3];
    return { path: isUp ? `M90 ${bottom}V${top}` : `M90 ${top}V${bottom}`, label: [104, (top + bottom) / 2 - 4, "start"] };
  };
  const right = decode.x + decode.w;
  const past = { path: `M${right + 2} ${decode.y + decode.h / 2}H${right + 30}V${store.y + store.h / 2}H${right + 3}`, label: [right + 10, decode.y + decode.h / 2 - 24, "start"] };
  return { client: down(client, gateway), decode: down(gateway, decode), nixl: down(decode, prefill, true), prefillStore: down(prefill, store), decodeStore: past };
}
