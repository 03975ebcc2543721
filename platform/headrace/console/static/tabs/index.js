// The tabs, in their order. A new one is a module and a line here; `needs` names the documents that it reads beside the status.
import { Advice } from "./advice.js";
import { Kv } from "./kv.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Settings } from "./settings.js";
import { Tenants } from "./tenants.js";

export const TABS = [
  { id: "overview", label: "Overview", View: Overview, needs: [] },
  { id: "requests", label: "Requests", View: Requests, needs: ["requests"] },
  { id: "kv", label: "KV", View: Kv, needs: [] },
  { id: "advice", label: "Advice", View: Advice, needs: [] },
  { id: "tenants", label: "Tenants", View: Tenants, needs: ["requests", "usage"] },
  { id: "settings", label: "Settings", View: Settings, needs: [] },
  { id: "playground", label: "Playground", View: Playground, needs: [] },
];
