"""Records -> HTTP: a dashboard, its live stream and /metrics, for those who may see them.

    feed.py        the sampler's spans -> Sightings, one a second, for however many viewers
    stream.py      Sightings -> server-sent events; whoever is slow gets the newest only
    guarding.py    who is answered, and who is not
    peers.py       which user of this machine is on the other end of a connection
    answers.py     costly answers, made once for all who ask at the same time
    application.py addresses -> answers
    connections.py what a connection may take: time, size, number
    server.py      a socket, a loop, and an end that is quick

What is served (pages, reports, plans, metrics) comes in as functions: this room knows none of it.
It needs starlette and uvicorn (the extra `web`), so nobody imports it but inside a function.
"""
