"""`oomph serve`: a dashboard of this machine, and /metrics for Prometheus."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.verbs.serve import Served

DESCRIPTION = """\
Serve a dashboard of this machine: its GPUs live (how full, how busy, whose), the runs
that `oomph watch` recorded with their reports, plans, and "Will it fit?" for models by
name. Ctrl-C stops it.
By default only you, on this machine, can open it. With --host or --token, everyone who
has the printed token can, and sees everything, including what other users run here."""

EXAMPLES = """\
examples:
  oomph serve
  oomph serve --plans plans/                    show pages of oomph plan --html, and plan.json
  oomph serve --workloads .                     ask "Will it fit?" of workloads below .
  oomph serve --host 0.0.0.0                    open it to other machines; prints a token
  OOMPH_TOKEN=... oomph serve --host gpu7       use your own token
  oomph serve --grafana > dashboard.json        a Grafana dashboard that reads /metrics

exit codes: 0 stopped by you; 2 a wrong flag, a port in use, or a missing package."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8765,
        help="the port; 0 picks a free one (default: 8765)",
    )
    parser.add_argument("--token", action="store_true", help="require a token on 127.0.0.1 as well")
    parser.add_argument("--plans", metavar="DIR", help="show the plans in this directory")
    parser.add_argument(
        "--workloads",
        metavar="DIR",
        help='offer the Workloads in files below this directory on the page "Will it fit?"; they'
        " are executed in the sandbox",
    )
    parser.add_argument(
        "--per-process", action="store_true", help="add one series per process to /metrics"
    )
    parser.add_argument(
        "--grafana", action="store_true", help="print a Grafana dashboard instead of serving"
    )


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.serve import grafana_dashboard, serve

    if options.grafana:
        print(grafana_dashboard())
        return 0
    serve(
        host=options.host,
        port=options.port,
        token=options.token,
        plans=options.plans,
        workloads=options.workloads,
        per_process=options.per_process,
        tell=_print_as_json if options.json else _print,
    )
    return 0


def _print(served: Served) -> None:
    if served.token:
        whose = "everyone who has this address can see everything"
    else:
        whose = "only for you" if served.is_local else "with the token in OOMPH_TOKEN"
    print(f"{served.url}\n{whose}; Ctrl-C stops it", flush=True)


def _print_as_json(served: Served) -> None:
    from oomph.records.stored import as_json

    print(as_json(served), flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a port: 0 to 65535")
    return int(text)
