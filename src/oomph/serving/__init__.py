"""Records -> HTTP: a dashboard, its live stream and /metrics, with access control.

    dashboard.py   `oomph serve`: its address and who may access it
    feed.py        the sampler's spans -> Sightings, one a second, for any number of viewers
    guarding.py    which requests are answered
    application.py what is served (the machine, runs, plans, metrics), by address
    questions.py   what the page "Will it fit?" may ask
    searches.py    a question -> plans: one search at a time, in a process (search_child.py)
    server.py      the socket, limits per connection, and a quick shutdown

It needs starlette and uvicorn (the extra `web`), so import it only inside a function.
"""
