"""The receiver of the gateway's metrics."""

from __future__ import annotations


class GatewayMetrics:
    """A receiver of the gateway's metrics; this one ignores them. The methods of a class that does
    not must be cheap: each request calls some."""

    def request_done(
        self,
        model: str,
        path: str,
        status: int,
        ttft_s: float | None,
        seconds: float,
        streamed: bool,
    ) -> None:
        """Record that a relayed request ended.

        Args:
            model: own name of the model; empty if the request was refused before it was known.
            path: the route's template, such as `/v1/responses/{response_id}`.
            status: the HTTP status; 499 when the client hung up before one was sent.
            ttft_s: seconds to the first body byte, None when none was sent.
            seconds: time from the request's head to the response's end.
            streamed: whether the answer was an event stream.
        """

    def tenant_done(self, tenant: str, model: str, status: int, tokens: int | None) -> None:
        """Record that a relayed request of a tenant ended.

        Args:
            tenant: the tenant that the API key proves; the operator's key file bounds their number.
            model: own name of the model; empty if the request was refused before it was known.
            tokens: number of tokens in the answer; None if unknown.
        """

    def own_seconds(self, seconds: float) -> None:
        """Record the seconds of gateway code, without waits, before a request went to a replica."""

    def refused(self, status: int, code: str) -> None:
        """Record that the gateway refused a request, or ended its stream with an error.

        Args:
            code: one of the some thirty codes of `headrace.gateway.errors`.
        """

    def techniques(self, applied: str) -> None:
        """Record that an answer began whose KV these techniques could change; `exact` for none."""

    def replica_lost(self, model: str, when: str) -> None:
        """Record the loss of a replica.

        Args:
            model: own name of its model.
            when: `before` it got the request, or while it `worked` on it. After its stream had
                begun: `resumed` if another replica resumed it, `stream` if it ended with an error.
        """

    def queued(self, model: str, slo: str, seconds: float) -> None:
        """Record how long a request of a class waited in a model's queue before it was sent."""

    def queue(self, model: str, waiting: int, predicted_wait_s: float) -> None:
        """Record the state of a model's queue, if admission is on; called about once a second.

        Args:
            model: own name of the model.
            waiting: number of requests in the queue.
            predicted_wait_s: predicted wait of the last one of them.
        """

    def keys_stale(self, stale: bool) -> None:
        """Record whether the key file changed and cannot be read; called about once a second."""

    def state(self, model: str, ready: int, relaying: int, oldest_report_s: float) -> None:
        """Record the state of a model at this gateway; called about once a second.

        Args:
            model: own name of the model.
            ready: number of available decode replicas.
            relaying: number of its requests that replicas work on, or that wait for one.
            oldest_report_s: age of the oldest report that plans are made from; 0 if this gateway
                makes no plans.
        """
