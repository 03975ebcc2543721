// Where other pages are: Ray's dashboard and Grafana, as this browser reaches them.

const LOOPBACK = ["localhost", "127.0.0.1", "::1", "[::1]"];
const isUrl = (text) => /^https?:\/\//.test(text ?? "");

/**
 * Ray's dashboard: {href} if this browser can reach it, {note} if it needs a tunnel first, null without a dashboard.
 *
 * `ray` is the status's own; `here` is this page's location. A dashboard that listens on its own machine only is reached
 * from there, or through the tunnel through which this page came. An address inside a cluster is reached from nowhere else.
 */
export function rayDashboard(ray, here) {
  const address = ray?.dashboard;
  if (!address) return null;
  const page = `/#/serve/applications/${encodeURIComponent(ray.app ?? "")}`;
  if (isUrl(address)) return { href: address.replace(/\/+$/, "") + page };
  const { hostname, port } = new URL(`http://${address}`);
  const isLocal = LOOPBACK.includes(hostname);
  if (isLocal && LOOPBACK.includes(here.hostname)) return { href: `http://${here.hostname}:${port}${page}` };
  if (hostname === here.hostname) return { href: `http://${address}${page}` };
  if (isLocal) return { note: `It listens on the gateway's machine only: ssh -L ${port}:127.0.0.1:${port} ${here.hostname}` };
  return { note: `It listens inside the cluster, at ${address}. On Kubernetes: kubectl port-forward service/RAY_HEAD_SERVICE ${port}:${port}` };
}

/** One replica's page in Ray's dashboard, with its logs; null if this browser does not reach it. */
export function replicaPage(ray, here, one) {
  const { href } = rayDashboard(ray, here) ?? {};
  return href ? `${href}/${encodeURIComponent(one.deployment ?? "")}/${encodeURIComponent(one.replica_id ?? "")}` : null;
}

/** Grafana's URL if one is configured, else null. */
export const grafana = (ray) => (isUrl(ray?.grafana) ? ray.grafana : null);
