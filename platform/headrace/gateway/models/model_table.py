"""The models of a gateway by name, and the choice of the one that answers a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.request_context import RequestContext
from headrace.gateway.route_table import RouteTable


class ModelTable:
    """The models of a gateway, for one event loop.

    Args:
        models: the models, at least one.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._tables: tuple[RouteTable, ...] = ()
        self._routes = RouteTable()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def routes(self) -> RouteTable:
        """The routes of all models' replicas."""
        tables = tuple(model.pool.routes for model in self._models)
        if len(tables) == 1:
            return tables[0]
        if tables != self._tables:
            self._tables = tables
            self._routes = RouteTable(route for table in tables for route in table.routes)
        return self._routes

    @property
    def all_routes_known(self) -> bool:
        """Whether replicas of every model have reported their routes."""
        return all(model.pool.routes for model in self._models)

    async def ready(self) -> int:
        """Return the number of available decode replicas, after the first poll of each model."""
        return sum([await model.pool.ready() for model in self._models])

    @property
    def fallbacks_ready(self) -> int:
        """Number of available prefill replicas that answer if no decode replica can."""
        return sum(model.pool.fallbacks_ready for model in self._models)

    @property
    def relaying(self) -> int:
        """Number of requests that replicas work on, or that wait for one."""
        return sum(model.relaying for model in self._models)

    async def choose(self, context: RequestContext) -> ServedModel:
        """Return the model that answers a request."""
        return self._models[0]
