"""a dashboard of this machine in the browser, and /metrics for Prometheus"""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.verbs.serving import Served

DESCRIPTION = """\
Serve a web page of this machine: its GPUs live, whose they are, how full and how busy; the
runs that `oomph watch` keeps, with their reports; and plans. Ctrl-C ends it.
It is for this user on this machine alone, unless --host or --token says otherwise: then
whoever has the token that is printed may see everything, also what others run here."""

EXAMPLES = """\
examples:
  oomph serve
  oomph serve --plans plans/                    pages of oomph plan --html, and plan.json
  oomph serve --host 0.0.0.0                    for other machines; prints a token
  OOMPH_TOKEN=... oomph serve --host gpu7       with a token of your own
  oomph serve --grafana > dashboard.json        for Grafana, over /metrics

exit codes: 0 it was ended; 2 a wrong flag, a port that is taken, or what is missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8765,
        help="its port; 0 takes any that is free (default: 8765)",
    )
    parser.add_argument("--token", action="store_true", help="demand a token on 127.0.0.1, too")
    parser.add_argument("--plans", metavar="DIR", help="a directory of plans to show")
    parser.add_argument(
        "--per-process", action="store_true", help="in /metrics, a series for each process, too"
    )
    parser.add_argument(
        "--grafana", action="store_true", help="print a dashboard for Grafana, and serve nothing"
    )


def run(options: argparse.Namespace) -> int:
    from oomph.verbs import serving

    if options.grafana:
        print(serving.grafana_dashboard())
        return 0
    serving.serve(
        host=options.host,
        port=options.port,
        token=options.token,
        plans=options.plans,
        per_process=options.per_process,
        tell=_tell_in_json if options.json else _tell,
    )
    return 0


def _tell(served: Served) -> None:
    whose = "for this user alone" if served.is_local and not served.token else ""
    if served.token:
        whose = "whoever has this address may see everything"
    print(f"{served.url}\n{whose or 'with the token of OOMPH_TOKEN'}; Ctrl-C ends it", flush=True)


def _tell_in_json(served: Served) -> None:
    from oomph.records.stored import as_json

    print(as_json(served), flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no port: 0 to 65535")
    return int(text)
