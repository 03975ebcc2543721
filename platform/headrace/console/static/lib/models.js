// The models of the app, as the gateway's status tells them.

/** The gateway's state of each model, as [name, state]; of an app's only model, the name is "". */
export const gatewayModels = (status) => Object.entries(status.gateway?.models ?? { "": status.gateway ?? {} });

/** The names of the models. */
export function modelNames(status) {
  const named = Object.keys(status.gateway?.models ?? {});
  return named.length ? named : [status.replicas.find((one) => one.model)?.model ?? ""];
}

/** The queue of each model that has one, as [name, queue]. */
export const queuesOf = (status) => gatewayModels(status).flatMap(([name, model]) => (model.queue ? [[name, model.queue]] : []));
