"""The verb serve: serve the dashboard of this machine until a signal ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.serving.dashboard import Served as Served


def serve(
    *,
    host: str,
    port: int,
    token: bool,
    plans: str | None,
    workloads: str | None,
    per_process: bool,
    tell: Callable[[Served], None],
) -> None:
    """Serve until a signal ends it; `tell` is called with the address once it is ready."""
    from oomph.serving import dashboard

    dashboard.serve(
        host=host,
        port=port,
        token=token,
        plans=plans,
        workloads=workloads,
        per_process=per_process,
        tell=tell,
    )


def grafana_dashboard() -> str:
    """Return a Grafana dashboard for /metrics, as JSON."""
    from oomph.serving import dashboard

    return dashboard.grafana_dashboard()
