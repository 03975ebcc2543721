// Reads a JSON list of custom resources from stdin and prints a JSON list of what is wrong with them.
// Run in a folder where package.json's packages are installed.
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import { PodMonitor, PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const kinds = { HTTPRoute, PodMonitor, PrometheusRule };
const wrong = [];
for (const one of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    new kinds[one.kind](one).validate();
  } catch (error) {
    wrong.push(`${one.kind}: ${error.message}`);
  }
}
console.log(JSON.stringify(wrong));
